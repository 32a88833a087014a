"""The errors cosched raises for a person to read.

::

    CoschedError
    ├── ConfigError        a configuration value is wrong: names the value, the limit, the choices
    ├── RequestError       one request is wrong: names the field; becomes HTTP 400
    ├── LimitError         an API key has too many requests or batches open; becomes HTTP 429
    ├── SeamError          SGLang is not the version the patches were written for
    └── PlanError          a policy returned a plan the engine cannot run (a bug in the policy)

A lack of capacity is an ordinary return (`cosched.core.plan.SkipReason`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class CoschedError(Exception):
    """Base of every error that cosched raises on purpose.

    exit_code  what a command ends with: 2 if its user can correct it, 1 if something failed
    """

    exit_code: ClassVar[int] = 2


class ConfigError(CoschedError):
    """A configuration value, flag or file is wrong."""


class RequestError(CoschedError):
    """One request is wrong. `field` is the name the client used for it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class LimitError(CoschedError):
    """An API key has reached a limit. `retry_after_s`: when to try again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SeamError(CoschedError):
    """A place in SGLang that cosched hooks into is not what it expects."""


class PlanError(CoschedError):
    """A plan breaks a limit of the engine."""


def choices(names: Iterable[str]) -> str:
    """Names as they are shown in error messages: sorted, comma-separated."""
    return ", ".join(sorted(names))
