"""Messages that no chat template can render are the client's mistake."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched_patches.generate_request import WRONG_VALUES

    def as_value_error(original: Any, serving: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(serving, *args, **kwargs)
        except WRONG_VALUES as error:
            raise ValueError(f"messages: cannot be rendered as a prompt: {error!r}") from error

    return as_value_error


SEAM = Seam(
    target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
    kind="around",
    signature=("self", "request", "is_multimodal", "output_constrained"),
    hook=_hook,
    why=(
        "No messages at all, or with roles and contents that the model's template does not know, "
        "are answered with 500: templates raise whatever they meet."
    ),
)
