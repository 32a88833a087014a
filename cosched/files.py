"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

DEMO_MODEL_STAMP = "cosched_demo_model.json"
"""Written last into the folder of a demo model: it is whole, and its weights are random."""


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content in one step: an interrupted write leaves the old file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
