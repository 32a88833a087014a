"""The version of SGLang, which must be one that cosched was written for.

Signatures pass on later versions whose insides have changed, so the number itself is checked.
"""

from __future__ import annotations

import logging
import os

from cosched.errors import SeamError
from cosched.versions import SGLANG_VERSIONS, nearest_sglang

__all__ = ["ALLOW_VARIABLE", "check_version", "running_on"]

ALLOW_VARIABLE = "COSCHED_ALLOW_SGLANG"
"""Environment variable: another version that is let through at one's own risk."""


def check_version() -> str:
    """The supported version that the installed one is taken for. SeamError unless it is one of
    ours, or the one that `ALLOW_VARIABLE` names."""
    from sglang.version import __version__

    nearest = nearest_sglang(__version__)
    if __version__ == nearest:
        return nearest
    if os.environ.get(ALLOW_VARIABLE, "").strip() != __version__:
        raise SeamError(
            f"{running_on()} To try it all the same, set {ALLOW_VARIABLE}={__version__}: answers "
            "and scheduling are then untested."
        )
    logging.getLogger("cosched").warning(
        "%s %s lets it through, as if it were %s: ANSWERS AND SCHEDULING ARE UNTESTED with this "
        "version.",
        running_on(),
        ALLOW_VARIABLE,
        nearest,
    )
    return nearest


def running_on() -> str:
    from sglang.version import __version__

    supported = " and ".join(SGLANG_VERSIONS)
    return f"This is sglang {__version__}; cosched supports sglang {supported}."
