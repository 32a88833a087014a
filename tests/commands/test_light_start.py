"""Help and errors of a command come before anything that takes long to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cosched.cli import COMMANDS

HEAVY = {"matplotlib", "ray", "scipy", "sglang", "torch", "transformers"}

_PROGRAM = """
import contextlib, io, json, sys
from cosched.cli import main

said = {}
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        with contextlib.suppress(SystemExit):
            main(line)
    said[" ".join(line)] = out.getvalue(), sorted(set(sys.modules) & set(json.loads(sys.argv[2])))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, list[str]]]:
    """What each command says, and the heavy modules that are imported by then."""
    lines = [
        *([command, "--help"] for command in COMMANDS),
        ["simulate", "--modl", "x"],
        ["simulate", "--model", "GPT-5", "--online", "azure-like"],
        ["tune", "--online", "azure-like"],
        ["bench", "run", "--settings", "nothing", "--online", "azure-like"],
        ["bench", "suite", "--list"],
        ["estimate", "/nowhere.jsonl", "--trace", "azure-like"],
        ["profile", "slo", "--slo", "p99_ttft<=nothing", "--online", "azure-like"],
        ["config", "{\"nothing\": 1}"],
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(lines), json.dumps(sorted(HEAVY))],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, tuple[str, list[str]]] = json.loads(run.stdout)
    return found


def test_help_and_errors_import_nothing_heavy(said):
    assert {line: heavy for line, (_, heavy) in said.items() if heavy} == {}
    assert all(text for text, _ in said.values())


def test_each_error_names_what_is_wrong(said):
    for line, (text, _) in said.items():
        if "--help" not in line and "--list" not in line:
            assert text.startswith("cosched: ") and text.count("\n") == 1, text
