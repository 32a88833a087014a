"""Runs that stay in the process of the test."""

from __future__ import annotations

from cosched.config import ENV_VAR
from cosched.lab.simulation import parallel


def stay_in_process(monkeypatch):
    """Simulations run one after the other in this process. Returns the list of what really ran:
    results that a store had are not in it."""
    ran = []

    def call_all(function, arguments, *, num_jobs):
        for index, some in enumerate(arguments):
            ran.append(some[0])
            yield index, function(*some)

    monkeypatch.setattr(parallel, "call_all", call_all)
    monkeypatch.setenv(ENV_VAR, "")  # a run sets it
    return ran
