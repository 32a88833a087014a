"""Errors of readers, transformations and named workloads.

::

    CoschedError
    └── WorkloadError      a workload cannot be made as asked: names the value and the remedy
        └── RowError       one row of a file is wrong: file:line: reason
"""

from __future__ import annotations

from pathlib import Path

from cosched.errors import CoschedError


class WorkloadError(CoschedError):
    """A workload cannot be read or made as asked."""


class RowError(WorkloadError):
    """A row of a trace file is wrong. Lines count from 1, the header included."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason
