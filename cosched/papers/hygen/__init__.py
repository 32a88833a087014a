"""HyGen (docs/policies.md).

policy.py          two phases over a budget of predicted time (§4.1, Algorithms 1 and 3); the phases
                   are `cosched.schedule.phases`, the offline order is that of `cosched.pool`
victims.py         which offline requests are preempted (§4.1, Algorithm 2)
token_counters.py  fair order of online requests (§4.1, VTC)
sarathi.py         the baselines Sarathi++ and HyGen* (§5.1)
predictor.py       the linear predictor of iteration times (§4.2, Eq. 1)
names.py           the policies by name

Deviations from the paper are listed at the top of each module. The SLO-aware profiler (§4.2) is
`cosched profile slo`.
"""
