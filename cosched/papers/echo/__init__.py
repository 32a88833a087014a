"""Echo (docs/policies.md).

policy.py     offline admission by benefit per predicted second (§4.1, §6); candidates are found by
              `cosched.schedule.candidates`
predictor.py  the predictor of iteration times (§5.2)
names.py      the policies by name: the ladder of §7.1

Elsewhere, since the default policy uses it too: the order of eviction of §4.2 is "echo" in
`cosched.memory.eviction`, the reservation of §5.3 `cosched.memory.demand`, the buckets of §6
`cosched.pool.buckets`. Deviations from the paper are listed at the top of each module.
"""
