"""Values that would end the scheduler do not reach it."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

_INTERNAL = frozenset(
    {"is_normalized", "stop_regex_max_len", "stop_regex_strs", "stop_str_max_len", "stop_strs"}
)
"""Fields that SGLang fills itself; from a client they would leave others unchecked."""


def _hook() -> Any:
    from functools import cache
    from typing import get_type_hints

    import msgspec

    from cosched.engine.checks import check_tokenized
    from cosched.errors import RequestError
    from cosched_patches.active import limits_of

    @cache
    def checked_type(params_class: Any) -> Any:
        """The same fields, read from an object (SGLang's own is read from an array)."""
        hints = get_type_hints(params_class)
        fields = [
            (name, hint | None, None) for name, hint in hints.items() if name not in _INTERNAL
        ]
        name = params_class.__name__
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)

    def check_values(manager: Any, obj: Any, input_ids: Any) -> None:
        try:
            msgspec.convert(obj.sampling_params, checked_type(manager.sampling_params_class))
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {error}") from None
        try:
            check_tokenized(obj, input_ids, limits_of(manager))
        except RequestError as error:
            raise ValueError(str(error)) from None

    return check_values


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    kind="before",
    signature=("self", "obj", "input_ids"),
    hook=_hook,
    why=(
        "SGLang's sampling parameters have types that it does not check: a string as a "
        "``logit_bias`` raises in the scheduler and ends the server. What depends on the tokens of "
        "the prompt is checked here too: an empty prompt would never be answered, a "
        "``logprob_start_len`` must be within it."
    ),
)
