"""Which lines of a batch begin alike: a key for each, by which lines are sent in prefix order."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

CHUNK_BYTES = 256
MAX_CHUNKS = 64
_DIGEST_BYTES = 4


class _Prompt(msgspec.Struct):
    """What chat templates put at the beginning, in this order; the JSON as it was written."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def prefix_key(body: bytes) -> bytes:
    """A key for the JSON `body` of a request: prompts in the order of their keys are a walk through
    their radix tree, so that those with the same head stand together.

    Each `CHUNK_BYTES` of the prompt are four bytes of the key, up to `MAX_CHUNKS` (16 KiB of
    prompt), so that a key is small whatever the prompt.
    """
    prompt = msgspec.json.decode(body, type=_Prompt)
    text = b"".join(bytes(getattr(prompt, name)) for name in _Prompt.__struct_fields__)
    return b"".join(
        blake2b(text[start : start + CHUNK_BYTES], digest_size=_DIGEST_BYTES).digest()
        for start in range(0, min(len(text), CHUNK_BYTES * MAX_CHUNKS), CHUNK_BYTES)
    )
