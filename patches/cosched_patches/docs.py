"""``docs/sglang_seams.md``, made from the seams.

``python -m cosched_patches.docs`` prints the page; with ``--write``, run from the root of the
repository, it writes the file.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.versions import SGLANG_VERSION
from cosched_patches import http, memory, openai_endpoints, scheduler
from cosched_patches.internals import INTERNALS
from cosched_patches.seam import ALLOW_VARIABLE, Seam

PATH = Path("docs/sglang_seams.md")

_INTRO = f"""\
# Where cosched hooks into SGLang

Made by `python -m cosched_patches.docs --write` from `patches/cosched_patches/`; do not edit.

Written for and tested with **SGLang {SGLANG_VERSION}**. With `COSCHED_CONFIG` set, every process of
a server checks at its start that each place below exists with these parameters, hooks it, and
checks that the hook is in place. If that fails, the process stops with one line that names the
place, what was expected, what was found and the version of SGLang. Without `COSCHED_CONFIG` nothing
is hooked.

Another version of SGLang is refused even if all of that fits, since its insides may have changed:
`{ALLOW_VARIABLE}=VERSION` in the environment lets exactly that version through, with a
warning in the log of every process. [porting.md](porting.md) says how to move to another version.

Names of places are relative to `sglang.srt`. A hook `before` runs before the original and gets its
arguments, `after` gets its result, `around` calls it.
"""

_INTERNALS = """
## Used inside SGLang

Beside these places cosched reads, and in part writes, attributes of SGLang's classes
(`cosched/engine/port/` holds most of it). Every process checks at its start that they exist, and
stops with the name of one that does not.

"""
_WIDTH = 120


def render() -> str:
    """The page, in Markdown."""
    names = [
        _wrapped(f"* `{_short(target)}`: {', '.join(f'`{name}`' for name in names)}")
        for target, names in INTERNALS.items()
    ]
    parts = [_part(module) for module in (http, openai_endpoints, scheduler, memory)]
    return "".join([_INTRO, *parts, _INTERNALS, *names])


def _part(module: ModuleType) -> str:
    """The hooks of one module, a section each."""
    title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
    sections = [_section(tuple(seams)) for _, seams in groupby(module.SEAMS, lambda s: s.hook)]
    return f"\n## {title}\n" + "".join(sections)


def _section(seams: Sequence[Seam]) -> str:
    """The places with one hook."""
    kind, hook = seams[0].kind, seams[0].hook
    why = " ".join((hook.__doc__ or "").split()).replace("``", "`")
    why = re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", why)
    places = [_wrapped(f"* {kind} `{_short(s.target)}` ({s.parameters})") for s in seams]
    return f"\n### {hook.__name__}\n\n{''.join(places)}\n{_wrapped(why, indent='')}"


def _wrapped(text: str, indent: str = "  ") -> str:
    lines = textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _short(target: str) -> str:
    return target.removeprefix("sglang.srt.")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PATH.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
