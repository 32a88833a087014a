"""Every command that a help text, a message or a page names exists."""

from __future__ import annotations

import re
from importlib import import_module, util
from pathlib import Path

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.cli import COMMANDS

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("cosched", "kernels", "patches", "traces", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in ("", ".py", ".html", ".md", ".sh")
] + [ROOT / "README.md"]

# Where a command is meant and no sentence: behind `python -m`, in backquotes, or as code.
MODULE = re.compile(r"python -m\s+(cosched[\w.]*)(?: +([a-z][\w-]*))?")
COMMAND = re.compile(r"(?:`|^ {4,})cosched ([a-z][a-z-]*)(?: +([a-z][\w-]*))?(?=[ `\n])", re.M)
SCRIPT = re.compile(r"\bscripts/(\w+)(?:\.py)?\b")
OF_A_COMMIT = re.compile(r"(?:of commit|# at) [0-9a-f]{7}")
"""A script that was removed is named with the commit that has it."""
NO_PROGRAM = re.compile(r"(?<!\.)\brun_batch (status|cancel|fetch)\b")
"""The module `cosched.run_batch` is no program by itself."""


DOORS = {"cosched.bench": "bench", "cosched.profile": "profile", "cosched.run_batch": "batch"}
"""Modules that run a command of another module."""


def subcommands(module_name):
    """Names of a command's subcommands; empty: it has none."""
    app = getattr(import_module(module_name), "app", ())
    return {name for name in app if not name.startswith("-")}


def named_in(text):
    """(module, next word or None) of each command that a text names."""
    for module, word in MODULE.findall(text):
        yield module.rstrip("."), word or None
    for name, word in COMMAND.findall(text):
        yield name, word or None


def fault_of(name, word):
    if name == "cosched":
        return None if word is None or word in COMMANDS else f"cosched has no command {word!r}"
    if "." in name and util.find_spec(name) is None:
        return f"there is no module {name}"
    command = name if "." not in name else DOORS.get(name)
    if command is not None and command not in COMMANDS:
        return f"cosched has no command {command!r}"
    has = subcommands(COMMANDS[command][0] if command else name)
    if word is not None and has and command != "batch" and word not in has:
        return f"{name} has no subcommand {word!r}"
    return None


def faults_in(text):
    yield from (fault for name, word in named_in(text) if (fault := fault_of(name, word)))
    scripts = {one.stem for one in (ROOT / "scripts").iterdir()}
    now = "\n".join(line for line in text.splitlines() if not OF_A_COMMIT.search(line))
    yield from (f"there is no scripts/{n}" for n in SCRIPT.findall(now) if n not in scripts)
    yield from (f"run_batch {word} is no command" for word in NO_PROGRAM.findall(text))


def test_a_command_that_is_named_exists():
    texts = {path: path.read_text(encoding="utf-8", errors="ignore") for path in SOURCES}
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path, text in texts.items()
        for fault in faults_in(text)
    ]
    assert not faults
