"""``docs/sglang_seams.md``, made from the seams.

``python -m cosched_patches.docs`` prints the page; with ``--write``, run from the root of the
repository, it writes the file.
"""

from __future__ import annotations

import re
import sys
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

| class | names |
|---|---|
"""


def render() -> str:
    """The page, in Markdown."""
    rows = [
        f"| `{_short(target)}` | {', '.join(f'`{name}`' for name in names)} |\n"
        for target, names in INTERNALS.items()
    ]
    tables = [_table(module) for module in (http, openai_endpoints, scheduler, memory)]
    return "".join([_INTRO, *tables, _INTERNALS, *rows])


def _table(module: ModuleType) -> str:
    title = (module.__doc__ or "").partition("\n")[0].rstrip(".")
    head = f"\n## {title}\n\n| place | hook | what for |\n|---|---|---|\n"
    return head + "".join(
        _row(tuple(seams)) for _, seams in groupby(module.SEAMS, lambda s: s.hook)
    )


def _row(seams: Sequence[Seam]) -> str:
    """The places with one hook."""
    kind, hook = seams[0].kind, seams[0].hook
    why = " ".join((hook.__doc__ or "").split()).replace("``", "`")
    why = re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", why)
    places = "<br>".join(f"`{_short(seam.target)}({seam.parameters})`" for seam in seams)
    return f"| {places} | {kind} `{hook.__name__}` | {why} |\n"


def _short(target: str) -> str:
    return target.removeprefix("sglang.srt.")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PATH.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
