#!/usr/bin/env python3
"""A simulation with another value of a constant of the code: what does it matter?

    .venv/bin/python scripts/with_constant.py cosched.policy.deadlines:_LENT=0.4 --policy cosched \\
        --online azure-conv --online-rate 2.5 --offline arxiv --duration 120

The first argument names the module, the constant and the value; all others are those of
`cosched.simulate`. Where a module imports the constant of another, name the one that uses it.
"""

from __future__ import annotations

import importlib
import sys

from cosched.simulate import main as simulate


def set_constant(text: str) -> None:
    """SystemExit with one sentence where there is no such constant."""
    name, _, value = text.partition("=")
    module_name, _, constant = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        before = getattr(module, constant)
        number = type(before)(value)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        sys.exit(f"{text!r} is not MODULE:CONSTANT=VALUE of a number: {error}")
    setattr(module, constant, number)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    set_constant(sys.argv[1])
    simulate(sys.argv[2:])
