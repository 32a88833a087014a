"""Co-serving of online and offline LLM requests on one SGLang replica."""

from __future__ import annotations

import importlib


def __getattr__(name: str) -> object:
    """`cosched.results`, imported when it is asked for: a server needs none of it."""
    if name == "results":
        return importlib.import_module("cosched.lab.results").results
    raise AttributeError(f"module 'cosched' has no attribute {name!r}")
