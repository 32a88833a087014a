"""EcoServe (docs/policies.md).

policy.py        the steps of a plan (§3, Algorithm 1)
work.py          which generations run, and what is promised to them
queues.py        the queue of generations that wait, exact allocation (§3.2, §3.3)
hosting.py       guests in memory that a host needs later (§3.4)
prompts.py       prompts up to the target forward size (§3.2.1)
forward_size.py  the target forward size (§2.1)
config.py        the choices of the operator
coupled.py       the coupled schedulers that it is compared with (§2.1, §2.2, Fig. 1)
names.py         the policies by name

Predicted lengths (§2.3) are `cosched.predict.length_estimator`.
"""
