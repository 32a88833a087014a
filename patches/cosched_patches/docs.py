"""The list of hooks in ``docs/porting.md``, made from the seams.

``python -m cosched_patches.docs``, run from the root of the repository, writes it into the page,
between ``<!-- hooks -->`` and ``<!-- /hooks -->``. A test checks that it is current.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched_patches import http, memory, openai_endpoints, scheduler
from cosched_patches.seam import Seam

PATH = Path("docs/porting.md")

_OPENING, _CLOSING = "<!-- hooks -->\n", "<!-- /hooks -->\n"
_WIDTH = 120


def with_hooks(page: str) -> str:
    """The page with a new list."""
    before, _, rest = page.partition(_OPENING)
    _, _, after = rest.partition(_CLOSING)
    parts = [_part(module) for module in (http, openai_endpoints, scheduler, memory)]
    return "".join([before, _OPENING, *parts, _CLOSING, after])


def _part(module: ModuleType) -> str:
    """The hooks of one module, a line each."""
    title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
    lines = [_line(tuple(seams)) for _, seams in groupby(module.SEAMS, lambda s: s.hook)]
    return f"\n**{title}**\n\n" + "".join(lines)


def _line(seams: Sequence[Seam]) -> str:
    """The places with one hook, and the first sentence of its docstring."""
    hook = seams[0].hook
    why = " ".join((hook.__doc__ or "").split()).replace("``", "`")
    why = re.split(r"(?<=[.]) (?=[A-Z`])", why, maxsplit=1)[0]
    places = ", ".join(f"`{seam.target.removeprefix('sglang.srt.')}`" for seam in seams)
    lines = textwrap.wrap(
        f"* `{hook.__name__}` {seams[0].kind} {places}: {why}",
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(with_hooks(PATH.read_text(encoding="utf-8")), encoding="utf-8")
