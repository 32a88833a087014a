"""One plan for all tensor-parallel ranks and pipeline stages of a replica.

Each rank runs its own scheduler, and all must do the same. Rank 0 plans and sends its plan, so
inputs of the plan (clocks, a predictor that learns from floating-point sums, failures) may differ
on other ranks. The requests do not: SGLang gives every rank the same ones in the same order. Later
stages of a pipeline run the same batches later: each plan goes from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from cosched.memory.eviction import Eviction

_BUFFER_BYTES = 32_768
_HEADER_BYTES = 8


class Shared(msgspec.Struct, array_like=True, frozen=True):
    """What rank 0 sends to the others.

    plan       `Plan.to_json`
    evictions  None: the engine's order holds (`cosched.engine.tree_core`)
    features   place of a feature -> `Feature.to_share`
    """

    plan: msgspec.Raw
    evictions: Sequence[Eviction] | None = None
    features: dict[str, Any] = {}


class Ranks:
    """The ranks that schedule together. All of them call `share` equally often."""

    def __init__(
        self,
        group: Any | None,
        *,
        is_source: bool,
        relay: Callable[[bytes | None], bytes] | None = None,
    ) -> None:
        """group: a process group on the CPU, of the ranks of the first stage, None: one rank, or a
        later stage; is_source: this rank plans; relay: to the other stages, None: there are none"""
        self.is_source = is_source
        self._group = group
        self._relay = relay
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(Shared).decode
        self._buffer = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8)

    def share(self, own: Shared | None) -> Shared:
        """What rank 0 sends; the others pass None."""
        message = None if own is None else self._encode(own)
        if self._group is not None:
            message = self._broadcast_message(message or b"")
        if self._relay is not None:
            message = self._relay(message)
        if own is not None:
            return own
        assert message is not None, "one of the two brings it"
        return self._decode(message)

    def _broadcast_message(self, message: bytes) -> bytes:
        """One message of 32 KB, and a second one for the rest."""
        buffer = self._buffer
        if self.is_source:
            head = len(message).to_bytes(_HEADER_BYTES, "little") + message[: self._most]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(buffer)
        num_bytes = int.from_bytes(buffer[:_HEADER_BYTES].numpy().tobytes(), "little")
        if num_bytes > self._most:
            rest = torch.zeros(num_bytes - self._most, dtype=torch.uint8)
            if self.is_source:
                rest[:] = torch.frombuffer(bytearray(message[self._most :]), dtype=torch.uint8)
            self._broadcast(rest)
        if self.is_source:
            return message
        end = _HEADER_BYTES + min(num_bytes, self._most)
        message = buffer[_HEADER_BYTES:end].numpy().tobytes()
        if num_bytes > self._most:
            message += rest.numpy().tobytes()
        return message

    @property
    def _most(self) -> int:
        return _BUFFER_BYTES - _HEADER_BYTES

    def _broadcast(self, tensor: torch.Tensor) -> None:
        source = torch.distributed.get_global_rank(self._group, 0)
        torch.distributed.broadcast(tensor, src=source, group=self._group)
