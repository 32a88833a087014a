"""The host's arithmetic in C, where the machine has a compiler.

Triton compiles a launcher in C for each kernel that it runs, so wherever these kernels run there is
a compiler, and Triton's own builder and cache are used. Elsewhere the same is done with arrays, in
ten times the time and with the same results.
"""

from __future__ import annotations

import logging
import subprocess
from functools import cache
from importlib.resources import files
from typing import Any

logger = logging.getLogger(__name__)


@cache
def compiled_host() -> Any | None:
    """The functions of ``host.c``; None where they cannot be compiled. Takes a second when called
    for the first time on a machine."""
    source = (files("cosched_kernels") / "host.c").read_text()
    try:
        # Not before it is needed: it takes a while to import.
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(source, "cosched_host")
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        logger.warning("cosched: plans are made without compiled code: %s", error)
        return None
