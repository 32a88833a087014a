"""BROS (docs/policies.md).

policy.py       the steps of a plan (§4, Algorithm 1)
order.py        online requests by residual time, the limit of the iteration (lines 3 and 4)
packing.py      the batch under construction, and online requests in it (lines 5 to 14)
offline.py      offline requests, and exchange (lines 15 to 33)
round_robin.py  the baseline RR (§2.2, §7)
pages.py        which requests share a KV page (§5)
sglang_pages.py SGLang's allocator with such pages
config.py       what is left to the operator
predictor.py    the cost model C (§4.1)
names.py        the policies by name
"""
