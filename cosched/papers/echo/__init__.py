"""Echo (docs/policies.md).

policy.py        offline admission by benefit per predicted second (§4.1, §6); candidates are found
                 by `cosched.schedule.candidates`
kv_order.py      what is evicted first, and what is kept for online requests (§4.2, §5.3)
arrival_rate.py  the estimate of the arrival rate, and what is kept by it (§7.4)
predictor.py     the predictor of iteration times (§5.2)
names.py         the policies by name: the ladder of §7.1, and what goes beyond it

Elsewhere, since the default policy uses it too: the demand of §5.3 is `cosched.memory.demand`, the
buckets of §6 `cosched.pool.buckets`. Each module lists its deviations from the paper at its top.
"""
