"""Errors of lines as clients may read them: without paths of the server."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cosched.batch.jsonl.records import Failure

_HIDDEN = "[path]"
_SOURCE = r"(?:/[\w.+@-]+)+\.(?:py|pyc|so|c|cc|cpp|cu|h|hpp|rs|jinja)\b(?::\d+)?"
"""Files of programs, wherever they were built."""


class Redaction:
    """Takes paths of this machine out of texts."""

    def __init__(self, places: Iterable[str] = ()) -> None:
        """places: folders of the server beside those of its programs, its user and its work."""
        found = {*places, sys.prefix, str(Path.home()), str(Path.cwd()), tempfile.gettempdir()}
        folders = sorted((one for one in found if len(one) > 1 and one[0] == "/"), reverse=True)
        known = "|".join(map(re.escape, folders))
        own = rf"(?:{known})(?![\w.-])[^\s\"'\\,;:()\[\]<>]*"
        self._paths = re.compile(rf"(?<![\w/.:-])(?:{_SOURCE}|{own})")

    def text(self, text: str) -> str:
        return self._paths.sub(_HIDDEN, text)

    def failure(self, failure: Failure) -> Failure:
        """The same without paths, in its message and in the server's answer."""
        body = None if failure.body is None else self.text(failure.body.decode()).encode()
        return replace(failure, message=self.text(failure.message), body=body)
