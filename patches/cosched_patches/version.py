"""The version of SGLang, which must be the one that cosched was written for.

Signatures pass on later versions whose insides have changed, so the number itself is checked.
"""

from __future__ import annotations

import logging
import os

from cosched.errors import SeamError
from cosched.versions import SGLANG_VERSION

__all__ = ["ALLOW_VARIABLE", "check_version", "running_on"]

ALLOW_VARIABLE = "COSCHED_ALLOW_SGLANG"
"""Environment variable: another version that is let through at one's own risk."""


def check_version() -> None:
    """SeamError unless the installed version is ours, or the one that `ALLOW_VARIABLE` names."""
    from sglang.version import __version__

    if __version__ == SGLANG_VERSION:
        return
    if os.environ.get(ALLOW_VARIABLE, "").strip() != __version__:
        raise SeamError(
            f"{running_on()} To try it all the same, set {ALLOW_VARIABLE}={__version__}: answers "
            "and scheduling are then untested."
        )
    logging.getLogger("cosched").warning(
        "%s %s lets it through: ANSWERS AND SCHEDULING ARE UNTESTED with this version.",
        running_on(),
        ALLOW_VARIABLE,
    )


def running_on() -> str:
    from sglang.version import __version__

    return f"This is sglang {__version__}; cosched supports sglang {SGLANG_VERSION}."
