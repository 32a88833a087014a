"""What a result was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

SGLANG_VERSION = "0.5.23"
"""The version of SGLang that this release is written for and tested with."""


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of cosched, SGLang, torch, Python and `packages`, and the commit of the checkout,
    with ``-dirty`` where files differ from it. None: not installed, or outside a checkout."""
    named = ("cosched", "sglang", "torch", *packages)
    return {
        **{name: _version(name) for name in named},
        "python": platform.python_version(),
        "commit": _commit(),
    }


def version_text() -> str:
    """For ``--version``: a line for each package."""
    found = versions()
    commit = found.pop("commit")
    lines = [f"{name} {version or 'not installed'}" for name, version in found.items()]
    if commit is not None:
        lines[0] += f" (commit {commit})"
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed; a repository around it would not be cosched's
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
