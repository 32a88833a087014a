"""What a result was made with."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["SGLANG_VERSION", "SGLANG_VERSIONS", "nearest_sglang", "version_line", "versions"]

SGLANG_VERSIONS = ("0.5.23", "0.5.21")
"""The versions of SGLang that cosched is written for and tested with, the newest first."""

SGLANG_VERSION = SGLANG_VERSIONS[0]
"""The one that is installed by default."""


def nearest_sglang(version: str) -> str:
    """The supported version that a version of SGLang is taken for: itself, or else the newest one
    before it, or else the oldest."""
    if version in SGLANG_VERSIONS:
        return version
    number = _number(version)
    older = [known for known in SGLANG_VERSIONS if _number(known) <= number]
    return older[0] if older else SGLANG_VERSIONS[-1]


def _number(version: str) -> tuple[int, ...]:
    """Its release number, without what follows it (``.post1``, ``rc2``, ...)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of cosched, SGLang, torch, Python and `packages`, and the commit of the checkout,
    with ``-dirty`` where files differ from it. None: not installed, or outside a checkout."""
    named = ("cosched", "sglang", "torch", *packages)
    return {
        **{name: _version(name) for name in named},
        "python": platform.python_version(),
        "commit": _commit(),
    }


def version_line() -> str:
    """For ``--version``."""
    found = versions()
    commit = found.pop("commit")
    about = [f"{name} {version or 'not installed'}" for name, version in found.items()]
    if commit is not None:
        about[0] += f" (commit {commit})"
    return ", ".join(about)


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
