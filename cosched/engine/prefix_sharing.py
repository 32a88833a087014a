"""Whether a server's attention reads a shared prefix once, from SGLang's arguments.

What a model and its KV memory allow is known when the attention backend is built
(`cosched.engine.port.extend_attention`).
"""

from __future__ import annotations

from typing import Any

from cosched.config import Config
from cosched.errors import choices
from cosched.policies import policy_entry

FLAG = "--cosched-shared-prefix"

NAME = "cosched_shared_prefix"
"""The attention backend that shares whatever the flag says."""

MEASURED = ("triton",)
"""SGLang's attention backends beside which the kernels were measured on a GPU
(docs/results/kernels.md)."""

EXTENDED = (*MEASURED, "flashinfer", "fa3", "torch_native")
"""Those that the kernels can extend."""

NOT_SHARED_WITH = (
    ("disable_radix_cache", "without the radix tree requests share no KV"),
    ("speculative_algorithm", "batches that verify drafts are not shared"),
    ("enable_deterministic_inference", "what a request shares depends on those beside it"),
    ("enable_two_batch_overlap", "halves of a batch are not shared"),
    ("enable_pdmux", "prefills and decodes run in streams of their own"),
)
"""Server argument, and why nothing is shared with it."""


def why_not_shared(resolved: Any, config: Config, backends: tuple[str, str]) -> str | None:
    """Why attention reads a shared prefix as often as requests share it; None: once.

    resolved  SGLang's view of the arguments, completed
    backends  its attention backends of prefills and of decodes
    """
    mode = config.shared_prefix.mode
    prefill, decode = backends
    if mode == "off":
        return f"{FLAG} off"
    if NAME in (prefill, decode):
        return None
    if mode == "auto":
        if policy_entry(config.policy).make is None:
            return f"policy {config.policy} is SGLang as it is"
        if resolved.device != "cuda":
            return "there is no GPU"
    if prefill != decode:
        return f"prefills have attention backend {prefill}, decodes {decode}"
    if prefill not in EXTENDED:
        return f"attention backend {prefill} cannot be extended; choose from {choices(EXTENDED)}"
    for name, why in NOT_SHARED_WITH:
        if getattr(resolved, name):
            return f"--{name.replace('_', '-')}: {why}"
    if mode == "auto" and prefill not in MEASURED:
        return f"not measured beside attention backend {prefill}; {FLAG} on takes it"
    return None


def why_sharing_is_refused(resolved: Any, config: Config, backends: tuple[str, str]) -> str | None:
    """Why a server cannot start with its `shared_prefix.mode`. Arguments as of `why_not_shared`."""
    mode = config.shared_prefix.mode
    reason = why_not_shared(resolved, config, backends)
    if mode == "on" and reason is not None:
        return f"{FLAG} on is not possible: {reason}"
    if mode == "off" and NAME in backends:
        return f"--attention-backend {NAME} cannot go with {FLAG} off; drop one of them"
    return None
