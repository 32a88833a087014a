"""The adapter: the only package, with the patches, that imports SGLang.

It is larger than a scheduler is, because it is a server's: the loop and its view (2,400 lines); KV
memory (1,100); HTTP, shutdown and the operator's limits (900); failures of requests and policies
(600 and `port/recovery.py`); start and checks of flags (1,100); metrics and the decision log
(1,600). What depends on SGLang's names is in `port/` (2,300).
"""
