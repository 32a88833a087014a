"""A policy whose engine fails on requests with certain ids. A server loads it in its scheduler."""

import cosched.bootstrap  # isort: skip  # noqa: F401  # before sglang

import sys

from sglang.srt.managers.schedule_batch import Req

from cosched.policies import policy_entry

FAILS, LEAKS = "fails-", "leaks-"

_update = Req.update_finish_state


def _fail(req, *args, **options):
    if req.rid.startswith((FAILS, LEAKS)) and len(req.output_ids) == 4:
        if req.rid.startswith(LEAKS):
            processor = sys._getframe(1).f_locals["self"]
            processor.token_to_kv_pool_allocator.alloc(3)
        raise ZeroDivisionError(f"on {req.rid}")
    return _update(req, *args, **options)


class Poisoned:
    """hygen on an engine that fails on some requests"""

    def __init__(self, settings):
        self._inner = policy_entry("hygen").make(settings)
        self.initial = self._inner.initial
        Req.update_finish_state = _fail

    def plan(self, view, state):
        return self._inner.plan(view, state)
