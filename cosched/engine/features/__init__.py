"""The features of the engine, a file each. Each `Feature` in this folder is found."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules

from cosched.engine.feature import Feature


def all_features() -> Iterator[type[Feature]]:
    """In the order of their files."""
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        for kind in vars(module).values():
            if isclass(kind) and issubclass(kind, Feature) and kind.__module__ == module.__name__:
                yield kind
