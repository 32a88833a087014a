"""How the commands end: one JSON object as the last line, or one sentence and an exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cosched.errors import CoschedError
from cosched.simulation.versions import versions

__all__ = ["run_command"]


def run_command(arguments: argparse.Namespace) -> None:
    """Call ``arguments.execute`` and print what it returns, with the versions.

    Exits with 2 and one sentence when the arguments are wrong, with 130 when interrupted.
    """
    execute: Callable[[argparse.Namespace], Mapping[str, Any]] = arguments.execute
    try:
        result = execute(arguments)
    except CoschedError as error:
        print(f"cosched: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(json.dumps({"versions": versions(), **result}, sort_keys=True, allow_nan=False))
