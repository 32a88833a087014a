"""Values that would end the scheduler do not reach it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

_MOST_BIAS = 1e30
"""Far beyond any use, and far below what a float32 takes: infinite logits have no probabilities."""


_INTERNAL = frozenset(
    {"is_normalized", "stop_regex_max_len", "stop_regex_strs", "stop_str_max_len", "stop_strs"}
)
"""Fields that SGLang fills itself; from a client they would leave others unchecked."""


def _hook() -> Any:
    from functools import cache
    from typing import get_type_hints

    import msgspec

    @cache
    def checked_type(params_class: Any) -> Any:
        """The same fields, read from an object (SGLang's own is read from an array)."""
        hints = get_type_hints(params_class)
        fields = [
            (name, hint | None, None) for name, hint in hints.items() if name not in _INTERNAL
        ]
        name = params_class.__name__
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)

    def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
        lowest, highest = min(ids), max(ids)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{name}: {wrong} is no token id; the model's are 0 to {vocab_size - 1}"
            )

    def check_values(manager: Any, obj: Any, input_ids: Any) -> None:
        vocab_size = manager.model_config.vocab_size
        if input_ids:
            check_ids("input_ids", input_ids, vocab_size)
        try:
            params = msgspec.convert(
                obj.sampling_params, checked_type(manager.sampling_params_class)
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {error}") from None
        if params.stop_token_ids:
            check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        for token, bias in (params.logit_bias or {}).items():
            if not abs(bias) <= _MOST_BIAS:
                raise ValueError(f"logit_bias: {bias} for token {token} is beyond {_MOST_BIAS:g}")

    return check_values


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    kind="before",
    signature=("self", "obj", "input_ids"),
    hook=_hook,
    why=(
        "SGLang's sampling parameters have types that it does not check. A string as a "
        "``logit_bias``, a token id outside the vocabulary among ``input_ids``, or among "
        "``stop_token_ids`` beside a request with ``min_new_tokens``, raises in the scheduler and "
        "ends the server."
    ),
)
