"""Runs that stay in the process of the test."""

from __future__ import annotations

from cosched.config import ENV_VAR
from cosched.lab.simulation import parallel


def stay_in_process(monkeypatch):
    """Simulations run one after the other in this process. Returns the list of what really ran:
    results that a store had are not in it."""
    ran = []

    def in_processes(specs, *, num_jobs):
        for index, spec in enumerate(specs):
            ran.append(spec)
            yield index, parallel.execute(spec)

    monkeypatch.setattr(parallel, "in_processes", in_processes)
    monkeypatch.setenv(ENV_VAR, "")  # a run sets it
    return ran
