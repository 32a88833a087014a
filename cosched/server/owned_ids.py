"""Ids of sessions and stored responses belong to the API key that made them.

SGLang keeps both by an id that clients may choose and others may learn. In its processes each id
has its owner before it, so another key's request finds nothing, as for an unknown id. Nothing is
remembered, and several HTTP processes agree.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

owner: ContextVar[str | None] = ContextVar("owner", default=None)
"""The owner of the API key of this HTTP request; empty: it has none. None: a program around the
engine, or gRPC."""

_NO_KEY = "anyone"
_MOST_DIGITS = 16


def with_owner(client_id: str) -> str:
    """The id in SGLang's processes."""
    prefix = _prefix()
    return client_id if client_id.startswith(prefix) else prefix + client_id


def without_owner(text: str) -> str:
    """An id, or a message with ids, for the client."""
    prefix = _prefix()
    return text.replace(prefix, "") if prefix else text


def _prefix() -> str:
    name = owner.get()
    return "" if name is None else f"{name[:_MOST_DIGITS] or _NO_KEY}:"


class OwnedDict(MutableMapping[str, Any]):
    """A dict by client's ids that shows each owner what it stored."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self._all[with_owner(key)]

    def __setitem__(self, key: str, value: Any) -> None:
        self._all[with_owner(key)] = value

    def __delitem__(self, key: str) -> None:
        del self._all[with_owner(key)]

    def __iter__(self) -> Iterator[str]:
        prefix = _prefix()
        return (key.removeprefix(prefix) for key in self._all if key.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
