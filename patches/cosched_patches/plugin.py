"""The entry point ``sglang.srt.plugins: cosched``.

SGLang calls `register` in every one of its processes. Without ``COSCHED_CONFIG`` it does nothing.
"""

from __future__ import annotations

from cosched.config import load_config
from cosched.errors import CoschedError


def register() -> None:
    """Install every seam, or stop the process.

    SystemExit, because SGLang's plugin loader logs and swallows every `Exception`.
    """
    try:
        if load_config() is None:
            return
        import cosched.bootstrap  # before SGLang's modules
        from cosched_patches import internals, seam

        seam.check_version()
        internals.check_internals(internals.INTERNALS)
        from cosched.engine.port import attention
        from cosched_patches.seams import SEAMS

        seam.install(SEAMS)
        attention.register()
        if not cosched.bootstrap.has_cuda():
            from cosched.cpu import torch_native

            torch_native.install()
    except CoschedError as error:
        raise SystemExit(f"cosched: {error}") from None
    except Exception as error:
        raise SystemExit(f"cosched: cannot hook into SGLang: {error!r}") from error
