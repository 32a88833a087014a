"""``docs/sglang_seams.md``, made from the seams.

``python -m cosched_patches.docs`` prints the page; with ``--write``, run from the root of the
repository, it writes the file.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from cosched.versions import SGLANG_VERSION
from cosched_patches.internals import INTERNALS
from cosched_patches.seam import Seam
from cosched_patches.seams import SEAMS
from cosched_patches.version import ALLOW_VARIABLE

__all__ = ["PATH", "render"]

PATH = Path("docs/sglang_seams.md")

_INTRO = f"""\
# Where cosched hooks into SGLang

Made by `python -m cosched_patches.docs --write` from the modules in `patches/cosched_patches/`; do
not edit.

Written for and tested with **SGLang {SGLANG_VERSION}**. With `COSCHED_CONFIG` set, every process of
a server checks at its start that each place below exists with the parameters named here, hooks it,
and checks that the hook is in place. Where that fails, the process stops with one line that names
the place, what was expected, what was found and the version of SGLang. Without `COSCHED_CONFIG`
nothing is hooked.

Another version of SGLang is refused even where all of that fits, since its insides may have
changed: `{ALLOW_VARIABLE}=VERSION` in the environment lets exactly that version
through, with a warning in the log of every process. [porting.md](porting.md) says how to move to
another version.

Kinds: `before` runs ahead of the original and may change what it is given, `after` sees its result,
`around` calls it, `replace` takes its place.

| seam | place | kind |
|---|---|---|
"""


def render(seams: Iterable[Seam]) -> str:
    """The page, in Markdown."""
    seams = tuple(seams)
    rows = [f"| [{_name(s)}](#{_name(s)}) | `{_place(s)}` | {s.kind} |\n" for s in seams]
    sections = [_section(tuple(group)) for _, group in groupby(seams, _name)]
    return _INTRO + "".join(rows) + "".join(sections) + _internals()


def _internals() -> str:
    """The page's last section."""
    parts = [
        "\n## Used inside SGLang\n",
        _wrap(
            "Beside these places cosched reads, and in part writes, the following of SGLang's "
            "classes (`cosched/engine/port/` holds most of it). Each is looked for at the start of "
            "every process; what is gone stops it with its name."
        )
        + "\n",
        *_names(INTERNALS),
    ]
    return "\n".join(parts) + "\n"


def _names(internals: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [
        _wrap(f"* `{target}`: " + ", ".join(f"`{name}`" for name in names))
        for target, names in internals.items()
    ]


def _section(seams: Sequence[Seam]) -> str:
    """The seams of one module."""
    first = seams[0]
    facts = []
    for seam in seams:
        facts += [
            f"* **Place:** `{seam.target}`",
            f"* **Kind:** {seam.kind}",
            f"* **Parameters:** {', '.join(f'`{name}`' for name in seam.signature)}",
        ]
    facts.append(f"* **Why:** {first.why}")
    if first.upstream:
        facts.append(f"* **Upstream:** {_links(first.upstream)}")
    lines = [f"\n## {_name(first)}\n", _title(first) + "\n", *map(_wrap, facts)]
    return "\n".join(lines).replace("``", "`") + "\n"


def _module(seam: Seam) -> str:
    # The hook is a function of the seam's own module; a seam does not know its module otherwise.
    return seam.hook.__module__


def _name(seam: Seam) -> str:
    return _module(seam).rpartition(".")[2]


def _title(seam: Seam) -> str:
    return (sys.modules[_module(seam)].__doc__ or "").strip().split("\n\n")[0]


def _place(seam: Seam) -> str:
    """The target from its class or function on."""
    parts = seam.target.split(".")
    return ".".join(parts[-2:] if parts[-2][0].isupper() else parts[-1:])


def _links(upstream: str) -> str:
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", upstream)


def _wrap(line: str) -> str:
    return textwrap.fill(
        line, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cosched_patches.docs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", help=f"write {PATH} instead of printing")
    page = render(SEAMS)
    if parser.parse_args(argv).write:
        PATH.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
