"""``cosched COMMAND ...``: one command for all of them. Each is also a module: ``python -m``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class _Command(NamedTuple):
    module: str
    summary: str


COMMANDS: Mapping[str, _Command] = {
    "serve": _Command(
        "cosched.launch_server",
        "start a server for online and offline requests; takes every SGLang flag",
    ),
    "batch": _Command("cosched.run_batch", "run a file of requests as offline work"),
    "ray": _Command(
        "cosched.ray_data", "run a data set of requests on many replicas, with Ray Data"
    ),
    "demo": _Command(
        "cosched.lab.demo",
        "measure and draw, on a small model, what offline work costs online requests",
    ),
    "simulate": _Command("cosched.simulate", "run the scheduler on a simulated GPU"),
    "bench": _Command("cosched.bench", "compare policies and stock scheduling"),
    "tune": _Command("cosched.lab.tune", "choose budgets and sizes for a workload, by simulation"),
    "estimate": _Command(
        "cosched.lab.estimate", "estimate when a file of requests would finish beside a day of chat"
    ),
    "profile": _Command(
        "cosched.profile", "measure what iterations take; find the budget that meets targets"
    ),
    "explain": _Command("cosched.explain", "read a decision log: why did a request wait?"),
    "config": _Command("cosched.check_config", "validate or print the configuration"),
    "demo-model": _Command("cosched.lab.demo_model", "make a small model with random weights"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Only the chosen command is imported. The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if name in ("--version", "version"):
        from cosched.versions import version_line

        print(version_line())
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(
            f"cosched: no command {name!r}; choose from {', '.join(sorted(COMMANDS))}",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"cosched {name}", *arguments[1:]]
    # As with `python -m`, a policy of one's own is found in the folder one is in. Last, so that
    # nothing there takes the place of an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        run: Callable[[], int | None] = importlib.import_module(command.module).main
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "sglang"):
            raise
        print(
            f"cosched: {name} needs {error.name}, which is not installed: run scripts/setup, or "
            "install 'cosched[gpu]'",
            file=sys.stderr,
        )
        return 2
    return run() or 0


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: cosched COMMAND [options]",
            "",
            "Co-serving of online and offline LLM requests on one SGLang replica.",
            "",
            *lines,
            "",
            "cosched COMMAND --help explains one; cosched --version says what is installed.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
