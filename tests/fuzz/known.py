"""What stock SGLang does wrong with wrong requests, and cosched does not mend.

None of it hurts another request. `docs/api.md` names them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """`path` and `message` are searched for as regular expressions. Status 0: the connection broke
    in the middle of an answer."""

    path: str
    status: int
    message: str
    reason: str


KNOWN: tuple[Known, ...] = (
    Known(
        path="^/api/(chat|generate)$",
        status=0,
        message="peer closed connection",
        reason=(
            "SGLang reads a request to its Ollama routes after their stream has begun: a "
            "wrong value ends the connection instead of a 400"
        ),
    ),
    Known(
        path="^(/v1)?/detokenize$",
        status=500,
        message="out of range integral type conversion",
        reason="SGLang answers a negative id with 500 on its detokenize routes",
    ),
)


def known_reason(path: str, status: int, text: str) -> str | None:
    """Why this answer is no failure; None: it is one."""
    for known in KNOWN:
        if (
            known.status == status
            and re.search(known.path, path)
            and re.search(known.message, text)
        ):
            return known.reason
    return None
