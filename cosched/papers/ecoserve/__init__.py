"""EcoServe (docs/policies/ecoserve.md).

policy.py        decoupled prompts and generations, groups, hosts and guests (§3, Algorithm 1)
coupled.py       the coupled schedulers that it is compared with (§2.1, §2.2, Fig. 1)
forward_size.py  the target forward size (§2.1)
names.py         the policies by name

Deviations from the paper are listed at the top of each module. Predicted lengths (§2.3) are
`cosched.predict.lengths`.
"""
