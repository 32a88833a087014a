"""A request as cosched follows it: SGLang's `Req` and what cosched must remember of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from cosched.core.request import RequestClass, Slo
from cosched.core.wire import class_of_priority, slo_of_params

__all__ = ["TrackedRequest"]


class TrackedRequest:
    """Implements `cosched.core.request.Request` by reading the live `Req`: nothing to keep in step.

    What never changes (class, arrival, prompt, limit) is fixed when the request first comes; the
    object hangs on the `Req` as `req.cosched`, so it goes when that goes.
    """

    __slots__ = (
        "arrival_s",
        "arrival_seq",
        "first_reported_s",
        "first_token_s",
        "is_reported",
        "max_new_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_reported_tokens",
        "req",
        "request_class",
        "rid",
        "slo",
    )

    def __init__(self, req: Any, *, arrival_s: float, arrival_seq: int) -> None:
        self.req = req
        self.rid: str = req.rid
        self.request_class: RequestClass = class_of_priority(req.priority)
        self.slo: Slo = slo_of_params(getattr(req.sampling_params, "custom_params", None))
        self.num_prompt_tokens: int = len(req.origin_input_ids)
        self.max_new_tokens = int(req.sampling_params.max_new_tokens)
        self.arrival_s = arrival_s
        self.arrival_seq = arrival_seq
        self.first_token_s: float | None = None
        self.num_preemptions = 0
        self.num_queued_tokens = 0
        """Its length when it was last queued: what the queue's total was raised by."""
        # What `cosched.engine.service` has counted of it.
        self.num_reported_tokens = 0
        self.first_reported_s = 0.0
        self.is_reported = False
        req.cosched = self

    @classmethod
    def of(cls, req: Any) -> TrackedRequest | None:
        """What is known of a `Req`; None when cosched has not seen it."""
        tracked: TrackedRequest | None = getattr(req, "cosched", None)
        return tracked

    @property
    def num_output_tokens(self) -> int:
        return len(self.req.output_ids)

    @property
    def num_prefix_tokens(self) -> int:
        return len(self.req.prefix_indices)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens: what a prefix of it may be shared of."""
        return [*self.req.origin_input_ids, *self.req.output_ids]

    @property
    def prefix_key(self) -> Hashable:
        """Requests share nothing unless these are equal. SGLang has the LoRA adapter in its extra
        key."""
        return self.req.extra_key, self.req.cache_salt

    @property
    def num_computed_tokens(self) -> int:
        return self.req.kv.kv_committed_len  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"TrackedRequest({self.rid!r}, {self.request_class.value}, seq={self.arrival_seq})"
