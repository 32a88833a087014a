"""Policies that fail while a request for `TRIGGER` tokens is there, and else are `sarathi`."""

from __future__ import annotations

import time
from itertools import chain

from cosched.policies import policy_entry

TRIGGER = 77


class Raises:
    """raises in each plan"""

    initial = None

    def __init__(self, settings):
        self._inner = policy_entry("sarathi").make(settings)
        self.initial = self._inner.initial

    def plan(self, view, state):
        there = chain(view.online, view.running, view.unfinished)
        if any(request.max_new_tokens == TRIGGER for request in there):
            return self.fail(view, state)
        return self._inner.plan(view, state)

    def fail(self, view, state):
        raise ZeroDivisionError("on purpose")


class Garbage(Raises):
    """returns what is no plan"""

    made = (None, "plan", (), (None, None), ({"prefill": {"nobody": 5}}, None), 7)

    def fail(self, view, state):
        return self.made[int(view.now_s * 1e6) % len(self.made)]


class Slow(Raises):
    """takes 5 s for a plan"""

    def fail(self, view, state):
        time.sleep(5)
        return self._inner.plan(view, state)


class Hangs(Raises):
    """does not return from a plan"""

    def fail(self, view, state):
        while True:
            time.sleep(1000)
