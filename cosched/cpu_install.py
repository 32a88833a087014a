"""Import `cosched.bootstrap` in every process that imports ``sglang``, just before it does.

``scripts/setup`` puts ``requirements/cosched-cpu.pth`` into the environment of the CPU profile, and
that file imports this module when Python starts. SGLang's own commands (``sglang serve``,
``python -m sglang.bench_serving``) import ``sglang`` long before they load plugins, and so do the
processes that they spawn. A process that does not import ``sglang`` imports nothing more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _BeforeSglang:
    """A finder on ``sys.meta_path``: finds nothing, and removes itself when ``sglang`` is asked
    for."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "sglang":
            sys.meta_path.remove(cls)
            import cosched.bootstrap  # noqa: F401
        return None


def install() -> None:
    """Idempotent. Does nothing in a process that has SGLang already."""
    if "sglang" not in sys.modules and _BeforeSglang not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeSglang)


install()
