"""BROS (docs/policies/bros.md).

policy.py       bidirectional scheduling by residual time (§4, Algorithm 1)
round_robin.py  the baseline RR (§2.2, §7)
pages.py        which requests share a KV page (§5); `cosched.engine.port.bidirectional` has the
                slots
predictor.py    the cost model C (§4.1)
names.py        the policies by name

Deviations from the paper are listed at the top of each module.
"""
