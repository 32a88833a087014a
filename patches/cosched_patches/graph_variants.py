"""A decode batch has a second CUDA graph, for requests that share a prefix."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.port.attention import graph_variants

    def create(original: Any, hf_config: Any) -> Any:
        return original(hf_config) or graph_variants()

    return create


SEAM = Seam(
    target=(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.create_attention_graph_variants"
    ),
    kind="around",
    signature=("hf_config",),
    hook=_hook,
    why=(
        "With the attention backend `cosched_shared_prefix` every size of decode batch is captured "
        "twice: attention by the inner backend, and by the plan of shared prefixes. SGLang asks "
        "before each replay which of the two it is."
    ),
)
