"""What cosched can plan of a server: from SGLang's arguments and the model's configuration.

Known before anything is loaded: `cosched config --model-path` prints it, a start that cannot be
planned ends with it. docs/operate.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from cosched.batch.config import BatchesConfig
from cosched.config import Config
from cosched.engine.prefix_sharing import why_sharing_is_refused
from cosched.errors import ConfigError, choices
from cosched.memory.config import ENGINE_ORDERS
from cosched.policies import POLICIES, policy_entry

EVICTION_FLAG = "--radix-eviction-policy"

REFUSED_ARGUMENTS: tuple[tuple[str, Any, str], ...] = (
    ("dllm_algorithm", None, "diffusion language models have no decode iterations"),
    ("enable_pdmux", False, "PD multiplexing schedules prefill and decode on its own"),
    ("min_free_slots_delay", None, "the slot delay would undo the plan"),
    ("prefill_decode_interval", 0, "that many iterations after a prefill would have no plan"),
    ("enable_hisparse", False, "HiSparse moves requests between prefill and decode on its own"),
    ("enable_priority_scheduling", False, "the policy orders the requests itself"),
    ("disable_radix_cache", False, "preempted requests keep their KV in the radix cache"),
    ("enable_session_radix_cache", False, "session caches hold KV outside the plan"),
    ("encoder_only", False, "an encoder generates nothing"),
)
"""Server argument, the only value that planning policies support, and why."""

SLOW_WHERE_MIXED = ("triton",)
"""Attention backends whose prefill kernel takes 8 to 10 times as long for a decode as their decode
kernel does (docs/results/gpu.md): it splits no context, and each query head of a decode takes a
tile of its own."""

_WAY_OUT = "use --cosched-policy sglang"

SPECULATIVE_ALGORITHMS = (
    "EAGLE",
    "EAGLE3",
    "STANDALONE",
    "NGRAM",
    "FROZEN_KV_MTP",
    "DSPARK",
    "DFLASH",
)
"""Those that are planned. NEXTN is EAGLE to SGLang."""

_NOT_WITH_STATES = (
    ("enable_hierarchical_cache", "what is copied to host memory with its states is not planned"),
    ("enable_unified_memory", "KV and states take each other's memory, which is not planned"),
)
"""Server argument, and why."""

_NOT_WITH_WINDOWS = (
    ("enable_unified_memory", "the two KV pools take each other's memory, which is not planned"),
    ("enable_encoder_swa_bounded_replay", "tokens that are computed again are not planned"),
    ("enable_decoder_swa_bounded_replay", "tokens that are computed again are not planned"),
)
"""The same, where the windows have a KV pool of their own."""

_OTHER_FRONT_ENDS = (
    ("smg_grpc_mode", "--smg-grpc-mode"),
    ("grpc_mode", "--grpc-mode"),
    ("use_ray", "--use-ray"),
)


class Support(NamedTuple):
    """What cosched does on a server.

    policy   its name
    plans    the policy plans iterations; False: SGLang schedules, and only front ends are refused
    refused  why the server cannot start so, and what to drop; empty: it can
    without  what it does not have there, and why
    """

    policy: str
    plans: bool
    refused: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def verdict(self) -> str:
        """One line."""
        if self.refused:
            return "refused"
        if not self.plans:
            return f"policy {self.policy}: SGLang schedules, cosched reads classes only"
        return "planned without: " + "; ".join(self.without) if self.without else "planned"


def support(server_args: Any, config: Config) -> Support:
    """Look at what SGLang has made of the arguments, because a model or another flag may decide
    what was not given."""
    resolved = resolved_arguments(server_args)
    plans = policy_entry(config.policy).make is not None
    return Support(
        policy=config.policy,
        plans=plans,
        refused=(
            *(_refused(server_args, resolved, config) if plans else ()),
            *_refused_batches(resolved, config),
            *_refused_sharing(resolved, config),
        ),
        without=(
            *(_without_kv_order(resolved, config) if plans else ()),
            *(_without_delayer(resolved) if plans else ()),
            *_without_front_end(resolved, config),
        ),
    )


def check_arguments(server_args: Any, config: Config) -> None:
    """ConfigError, one sentence for each reason, if the policy does not support the arguments."""
    found = support(server_args, config)
    if found.refused:
        raise ConfigError("; ".join(found.refused))


def resolved_arguments(server_args: Any) -> Any:
    """SGLang's view of the arguments, completed from the model and from each other."""
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args)


def why_mixing_is_slow(server_args: Any) -> str | None:
    """Why a batch of prefills and decodes takes longer than both apart on a server that may have
    such batches. It runs in the backend of prefills, also where decodes have another one."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    resolved = resolved_arguments(server_args)
    prefill, _ = attention_backends_of(resolved)
    if not resolved.enable_mixed_chunk or prefill not in SLOW_WHERE_MIXED:
        return None
    return (
        f"attention backend {prefill} takes 8 to 10 times as long for decodes in a batch with "
        "prefills (measured on an H100)"
    )


def why_sglang_evicts(resolved: Any, config: Config) -> str | None:
    """Why KV is evicted in SGLang's order although one of cosched's is configured."""
    from sglang.srt.arg_groups.overrides import model_config_of

    if not config.named_kv().is_ours:
        return None
    if resolved.disaggregation_mode == "decode":
        return "a decode server (--disaggregation-mode) has no radix tree"
    for name in ("enable_lmcache", "enable_flexkv"):
        if getattr(resolved, name):
            return f"{_flag(name)} replaces SGLang's radix tree"
    if not resolved.enable_hierarchical_cache:
        return None
    if model_config_of(resolved).is_hybrid_swa:
        return "host memory holds the KV of sliding windows too"
    if resolved.speculative_algorithm is not None:
        return "with drafts (--speculative-algorithm), host memory holds the draft model's KV too"
    if resolved.hicache_storage_backend is not None:
        return "KV below host memory (--hicache-storage-backend) is SGLang's"
    if resolved.hicache_host_memory_mode != "cache":
        return f"host memory is a {resolved.hicache_host_memory_mode}, not a cache"
    if resolved.tp_size > 1 and resolved.hicache_write_policy == "write_back":
        return "with --hicache-write-policy write_back ranks (--tp) do not evict at the same time"
    return None


def chooses_evictions(server_args: Any, config: Config) -> bool:
    """Whether cosched chooses what KV is evicted in a scheduler with these arguments."""
    return config.named_kv().is_ours and (
        why_sglang_evicts(resolved_arguments(server_args), config) is None
    )


def _refused(server_args: Any, resolved: Any, config: Config) -> Iterator[str]:
    decodes = resolved.disaggregation_mode == "decode"
    for name, expected, why in REFUSED_ARGUMENTS:
        value = getattr(resolved, name)
        if decodes and name == "disable_radix_cache":
            continue  # SGLang's default there: nothing is computed again
        if value == expected or (expected in (False, None) and not value):
            continue
        given = getattr(server_args, name)
        if given and given != expected:  # `value` may be another name of the same
            remedy = f"drop the flag or {_WAY_OUT}"
        else:
            remedy = f"the model or another flag sets it; {_WAY_OUT}"
        shown = _flag(name) if value is True else f"{_flag(name)} {value}"
        yield f"{shown} cannot go with --cosched-policy {config.policy}: {why}; {remedy}"
    algorithm = resolved.speculative_algorithm
    if algorithm is not None and algorithm not in SPECULATIVE_ALGORITHMS:
        yield (
            f"--speculative-algorithm {algorithm} cannot go with --cosched-policy {config.policy}: "
            f"cosched plans {choices(SPECULATIVE_ALGORITHMS)}; drop the flag or {_WAY_OUT}"
        )
    yield from _refused_model(server_args, resolved, config)
    yield from _refused_group(resolved, config)
    yield from _refused_stages(server_args, resolved, config)
    yield from _refused_roles(resolved, config)
    order, kv = resolved.radix_eviction_policy, config.named_kv()
    if order != ("lru" if kv.is_ours else kv.eviction):
        yield (
            f"{EVICTION_FLAG} {order} cannot go with kv.eviction {kv.eviction!r}: drop the flag, "
            f"or set kv.eviction to {choices(ENGINE_ORDERS)}"
        )
    if config.kv.bidirectional_pages:
        reason = _why_no_shared_pages(resolved)
        if reason is not None:
            yield f"kv.bidirectional_pages is not possible: {reason}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def has_states(server_args: Any) -> bool:
    """Whether layers of the model keep a state beside the KV."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    return bool(uses_ssm_state(model_config_of(server_args)))


def _refused_model(server_args: Any, resolved: Any, config: Config) -> Iterator[str]:
    """Models whose layers keep more than one kind of state."""
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    kinds = {
        "state-space or linear-attention layers": (has_states(server_args), _NOT_WITH_STATES),
        "sliding windows": (model.is_hybrid_swa, _NOT_WITH_WINDOWS),
    }
    if all(has for has, _ in kinds.values()):
        yield (
            f"--cosched-policy {config.policy} does not support this model: it has "
            f"{' and '.join(kinds)}; {_WAY_OUT}"
        )
    if model.is_hybrid_swa and model.full_attention_layer_ids == []:
        yield (
            f"--cosched-policy {config.policy} does not support this model: all its layers have "
            f"sliding windows; give --disable-hybrid-swa-memory, or {_WAY_OUT}"
        )
    for kind, (has, refused) in kinds.items():
        for name, why in refused if has else ():
            if getattr(resolved, name):
                yield (
                    f"{_flag(name)} cannot go with --cosched-policy {config.policy} and a model "
                    f"with {kind}: {why}; drop the flag or {_WAY_OUT}"
                )


def _refused_alone(flag: str, config: Config, why: str = "") -> Iterator[str]:
    """Of a policy that plans a scheduler by itself only (`PolicyEntry.groups`)."""
    if not policy_entry(config.policy).groups:
        able = choices(name for name, entry in POLICIES.items() if entry.groups)
        yield f"{flag} cannot go with --cosched-policy {config.policy}: {why}choose from {able}"


def _refused_group(resolved: Any, config: Config) -> Iterator[str]:
    """With DP attention."""
    if resolved.attn_dp_size == 1:
        return
    why = "its plans do not know of ranks that step together; "
    yield from _refused_alone("--enable-dp-attention", config, why)
    if config.tolerance is not None:
        yield "--enable-dp-attention cannot go with tolerance: other ranks' requests slow one down"
    if resolved.attn_cp_size > 1:
        yield "--enable-dp-attention with --attn-cp-size is not supported; drop one of them"


def _refused_stages(server_args: Any, resolved: Any, config: Config) -> Iterator[str]:
    """With pipeline parallelism."""
    from sglang.srt.arg_groups.overrides import model_config_of

    if resolved.pp_size == 1:
        return
    why = "its plans do not know of other microbatches; "
    yield from _refused_alone(f"--pp-size {resolved.pp_size}", config, why)
    if config.tolerance is not None:
        yield f"--pp-size {resolved.pp_size} cannot go with tolerance: microbatches share the time"
    for name in ("speculative_algorithm", "enable_hierarchical_cache", "enable_dp_attention"):
        if getattr(resolved, name):
            yield f"--pp-size with {_flag(name)} is not tested with a policy; drop one of them"
    if model_config_of(server_args).is_hybrid_swa or has_states(server_args):
        yield f"--pp-size with states or sliding windows is not tested with a policy; {_WAY_OUT}"


def _refused_roles(resolved: Any, config: Config) -> Iterator[str]:
    """With PD disaggregation."""
    mode = resolved.disaggregation_mode
    if mode == "null":
        return
    yield from _refused_alone(f"--disaggregation-mode {mode}", config)
    if config.tolerance is not None:
        yield f"--disaggregation-mode {mode} cannot go with tolerance"
    names = (
        "speculative_algorithm",
        "enable_hierarchical_cache",
        "enable_dp_attention",
        "enable_pd_role_switch",
        "disaggregation_decode_enable_radix_cache",
        "disaggregation_decode_enable_offload_kvcache",
        "optimistic_prefill_attempts",
    )
    for name in names:
        if getattr(resolved, name):
            yield f"a {mode} server with {_flag(name)} is not tested with a policy; drop the flag"
    if resolved.disaggregation_decode_host_receive_threshold < 1:
        yield "a decode server whose KV comes to host memory is not tested with a policy"
    if resolved.pp_size > 1:
        yield f"a {mode} server with --pp-size {resolved.pp_size} is not supported; drop the flag"


def _why_no_shared_pages(resolved: Any) -> str | None:
    """Why an online and an offline request cannot share a page."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    by_slot = ("torch_native", "triton", "flashinfer")
    others = [name for name in attention_backends_of(resolved) if name not in by_slot]
    if resolved.page_size == 1:
        return "with --page-size 1 a page has one slot, and nothing to share"
    if others:
        return (
            f"attention backend {others[0]} reads whole pages in their order, not slots; give "
            f"--attention-backend {choices(by_slot)}"
        )
    if resolved.enable_hierarchical_cache:
        return "host memory (--enable-hierarchical-cache) copies pages in ascending order"
    if resolved.attn_dp_size > 1:
        return "it is not tested with several ranks of DP attention"
    return None


def other_front_end(resolved: Any) -> str | None:
    """The flag of a front end that is not SGLang's HTTP server."""
    from sglang.srt.environ import envs

    for name, flag in _OTHER_FRONT_ENDS:
        if getattr(resolved, name):
            return flag
    return "SGLANG_RUST_SERVER" if envs.SGLANG_RUST_SERVER.get() else None


def why_no_batches(resolved: Any, batches: BatchesConfig) -> str | None:
    """Why a server cannot have Files and Batches in such a store."""
    flag = other_front_end(resolved)
    if flag is not None:
        return f"{flag} has a front end that is not SGLang's HTTP server"
    if resolved.tokenizer_worker_num > 1 and not batches.is_shared:
        return (
            f"the processes of --tokenizer-worker-num {resolved.tokenizer_worker_num} need a store "
            "that several may use; give --cosched-batches-url postgresql://..."
        )
    return None


def _refused_batches(resolved: Any, config: Config) -> Iterator[str]:
    reason = why_no_batches(resolved, config.batches)
    if reason is not None and config.batches.is_on:
        yield f"no Files and Batches (--cosched-batches) here: {reason}"


def _refused_sharing(resolved: Any, config: Config) -> Iterator[str]:
    from sglang.srt.arg_groups.overrides import attention_backends_of

    reason = why_sharing_is_refused(resolved, config, attention_backends_of(resolved))
    if reason is not None:
        yield reason


def _without_front_end(resolved: Any, config: Config) -> Iterator[str]:
    reason = why_no_batches(resolved, config.batches)
    front_end = other_front_end(resolved)
    if front_end is not None:
        but = ", but not in /v1/completions" if front_end == "SGLANG_RUST_SERVER" else ""
        yield (
            f"Files and Batches, service_tier, x-cosched headers, claims, /cosched ({reason}; it "
            f"passes `priority` and `custom_params`{but})"
        )
    elif reason is not None and not config.batches.is_on:
        yield f"Files and Batches ({reason})"
    if resolved.tokenizer_worker_num > 1 and config.claims.keys:
        yield "exact limits of API keys: each HTTP process counts its own requests"


def _without_delayer(resolved: Any) -> Iterator[str]:
    if resolved.enable_prefill_delayer:
        yield "SGLang's prefill delayer (the ranks agree on the time of each iteration instead)"


def _without_kv_order(resolved: Any, config: Config) -> Iterator[str]:
    reason = why_sglang_evicts(resolved, config)
    if reason is not None:
        yield f"KV eviction by {config.named_kv().eviction}: SGLang's LRU holds ({reason})"
