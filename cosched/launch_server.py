"""``python -m cosched.launch_server`` is ``cosched serve`` (`cosched.serve`).

Every process that SGLang spawns imports this module before ``sglang``, so it imports nothing more.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # prepares the process and its children

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    from cosched.cli import run

    return run("serve", argv)


if __name__ == "__main__":
    sys.exit(main())
