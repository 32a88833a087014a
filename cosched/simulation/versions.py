"""What a result was made with."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["versions"]


def versions() -> dict[str, str | None]:
    """Versions of cosched and SGLang, and the commit of the checkout (None outside one)."""
    return {
        "cosched": metadata.version("cosched"),
        "sglang": metadata.version("sglang"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        shown = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()
