"""The entry point ``sglang.srt.plugins: cosched``.

SGLang calls `register` in every one of its processes. Without ``COSCHED_CONFIG`` it does nothing.
"""

from __future__ import annotations

from cosched.config import load_config
from cosched.errors import CoschedError

__all__ = ["register"]


def register() -> None:
    """Install every seam, or stop the process.

    SystemExit, because SGLang's plugin loader logs and swallows every `Exception`.
    """
    try:
        config = load_config()
        if config is None:
            return
        import cosched.bootstrap  # before SGLang's heavy modules are imported
        from cosched_patches.internals import INTERNALS, check_internals
        from cosched_patches.seam import install
        from cosched_patches.seams import SEAMS
        from cosched_patches.version import check_version

        check_version()
        check_internals(INTERNALS)
        install(SEAMS)
        from cosched.engine.port import attention

        attention.register()
        if not cosched.bootstrap.has_cuda():
            from cosched.engine import cpu

            cpu.install()
    except CoschedError as error:
        raise SystemExit(f"cosched: {error}") from None
    except Exception as error:
        raise SystemExit(f"cosched: cannot hook into SGLang: {error!r}") from error
