"""Sliding windows of a simulated server, in a share of its layers, with a KV pool of their own."""

from __future__ import annotations

from dataclasses import replace

from cosched.core.batch import BatchShape, Prefill


def seen_through(shape: BatchShape, window: tuple[int, float]) -> BatchShape:
    """A batch whose attention costs as much without windows: what a share of the layers attends to
    ends after so many tokens. Within a chunk nothing is left out. window: tokens (0: there are no
    windows), share of the layers."""
    window_tokens, share = window
    if not window_tokens:
        return shape

    def mean(context: int) -> int:
        return int(context - share * max(context - window_tokens, 0))

    return replace(
        shape,
        prefills=[Prefill(p.num_new, mean(p.num_cached)) for p in shape.prefills],
        decodes=[*map(mean, shape.decodes)],
    )


def config_of(window_tokens: int) -> dict[str, object]:
    """Of the tiny model: one layer has windows."""
    if not window_tokens:
        return {}
    return {
        "num_hidden_layers": 2,
        "is_hybrid_swa": True,
        "hybrid_layer_pattern": [1, 0],
        "attention_chunk_size": window_tokens,  # SGLang takes it for the size of the windows
    }
