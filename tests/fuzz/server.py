"""`cosched.launch_server` where LoRA works without a GPU too.

Processes that a server starts import its main module, so that this reaches all of them.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first

import sys

from tests.adapters import unpin_memory

unpin_memory()

if __name__ == "__main__":
    from cosched.launch_server import main

    main(sys.argv[1:])
