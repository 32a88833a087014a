"""Prefix order: requests whose prompts begin alike are sent one after the other.

A server can compute a common beginning once only for requests that it has at about the same time,
and no client sends a whole job at once. The Batch API sorts by the same key in its database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import msgspec

CHUNK_BYTES, MAX_CHUNKS = 256, 64
"""Of the prompt, in a prefix key: 16 KiB."""
CHUNK_DIGEST_BYTES = 4

LINES_AT_SERVER = 2048
"""Requests of a job in flight at one server. It chooses among these: with fewer a job ends later
(docs/results/batches.md has how much), and with more a connection for each becomes dear."""
SORTED_TOGETHER = 4096
"""Items of a stream that are sorted at a time, where its end cannot be waited for."""

_T = TypeVar("_T")


class _Prompt(msgspec.Struct):
    """What chat templates put first, in this order, as raw JSON."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()


def prefix_key(body: bytes) -> bytes:
    """The `text_key` of the prompt in the JSON `body` of a request."""
    prompt = msgspec.json.decode(body, type=_Prompt)
    return text_key(b"".join(bytes(getattr(prompt, name)) for name in _Prompt.__struct_fields__))


def text_key(text: bytes) -> bytes:
    """A short key for a prompt: in the order of their keys, prompts with a common prefix are
    neighbours, as in a walk through their radix tree. Each chunk becomes four bytes."""
    return b"".join(
        blake2b(text[start : start + CHUNK_BYTES], digest_size=CHUNK_DIGEST_BYTES).digest()
        for start in range(0, min(len(text), CHUNK_BYTES * MAX_CHUNKS), CHUNK_BYTES)
    )


def in_prefix_order(
    items: Iterable[_T], key: Callable[[_T], bytes], *, together: int = SORTED_TOGETHER
) -> Iterator[_T]:
    """The items, sorted within each `together` of them; equal ones stay in their order."""
    left = iter(items)
    while some := list(islice(left, max(together, 1))):
        yield from sorted(some, key=key)
