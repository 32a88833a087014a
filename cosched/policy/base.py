"""What a policy is."""

from __future__ import annotations

from typing import Protocol

from cosched.core.plan import Plan
from cosched.core.view import View

__all__ = ["Policy"]


class Policy(Protocol):
    """Pure: no clock, no randomness, no torch, no sglang, and it changes nothing.

    The same object plans in production and under the virtual clock.
    """

    def plan(self, view: View) -> Plan:
        """The next iteration. Everything it may know is in `view`; called once per iteration."""
        ...
