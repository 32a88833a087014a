"""Which models the lines of a batch may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_ANY = "default"
"""SGLang's name for the model that is served, whatever its name."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Named(msgspec.Struct):
    model: Any = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What ``GET /v1/models`` lists: the model by its names, and LoRA adapters.

    SGLang itself answers any other name with the model that it serves.
    """

    names: frozenset[str]
    adapters: frozenset[str]

    @classmethod
    def of_listing(cls, content: bytes) -> ServedModels | None:
        """None: the listing cannot be read."""
        try:
            cards = msgspec.json.decode(content, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return cls(
            names=frozenset(card.id for card in cards if card.parent is None),
            adapters=frozenset(card.id for card in cards if card.parent is not None),
        )

    def fault(self, body: bytes) -> str | None:
        """Why the JSON `body` of a request names a model that is not served; None: it is served, or
        none is named."""
        model = msgspec.json.decode(body, type=_Named).model
        if not isinstance(model, str) or self._is_served(model):
            return None
        served = ", ".join(sorted(self.names | self.adapters))
        return f"the model {model!r} is not served here; served: {served}"

    def addressed(self, body: bytes) -> bytes:
        """The body as SGLang understands it: an adapter is named behind its model, as the base
        model answers where an adapter is named alone."""
        model = msgspec.json.decode(body, type=_Named).model
        if not isinstance(model, str) or model not in self.adapters or model in self.names:
            return body
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        named = f"{min(self.names, default=_ANY)}:{model}"
        return msgspec.json.encode({**fields, "model": named})

    def _is_served(self, model: str) -> bool:
        names = self.names | {_ANY}
        if model in names or model in self.adapters:
            return True
        return any(
            model.startswith(f"{name}:") and model[len(name) + 1 :].strip() in self.adapters
            for name in names
        )
