"""SGLang's command line, completed and checked for what cosched does with the engine."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import cosched.bootstrap
from cosched.batches.opening import check_store
from cosched.config import Config
from cosched.errors import ConfigError, choices
from cosched.kv.config import ENGINE_ORDERS
from cosched.policy.registry import policy_entry

__all__ = [
    "EVICTION_FLAG",
    "bind_cpu_threads",
    "check_arguments",
    "check_files",
    "check_ports",
    "engine_arguments",
    "eviction_arguments",
    "host_arguments",
    "refused_arguments",
]

EVICTION_FLAG = "--radix-eviction-policy"
HOST_WRITE_FLAG = "--hicache-write-policy"

_INTERVAL_FLAG = "--prefill-decode-interval"
_CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"


def engine_arguments(argv: Sequence[str], config: Config, *, mixed_chunk: bool) -> list[str]:
    """SGLang's arguments with what cosched adds: the policy's flags, and the CPU engine's where
    there is no GPU. What the user gave stands."""
    arguments = list(argv)
    for flag, argument in policy_entry(config.policy).arguments().items():
        if flag == "--enable-mixed-chunk" and not mixed_chunk:
            continue
        if not _given(argv, flag):
            arguments += argument
    if not _given(argv, EVICTION_FLAG):
        arguments += eviction_arguments(config)
    arguments += host_arguments(argv, config)
    plans = policy_entry(config.policy).make is not None
    if plans and not _given(argv, _INTERVAL_FLAG):
        arguments += [_INTERVAL_FLAG, "0"]  # for some models SGLang has another default
    device = _value(argv, "--device")
    if not cosched.bootstrap.has_cuda() and device in (None, "cpu"):
        if device is None:
            _check_no_gpu_is_left_out()
            arguments += ["--device", "cpu"]
        if not _given(argv, "--attention-backend"):
            arguments += ["--attention-backend", "torch_native"]
        if not _given(argv, "--mem-fraction-static", "--max-total-tokens"):
            arguments += ["--max-total-tokens", "65536"]
        if not _given(argv, "--sleep-on-idle"):
            # An idle scheduler would otherwise keep a whole core busy asking for requests.
            arguments.append("--sleep-on-idle")
    return arguments


def eviction_arguments(config: Config) -> list[str]:
    """What makes SGLang's tree evict in the order of the configuration, where that is its own."""
    kv = config.named_kv()
    if policy_entry(config.policy).make is None or kv.is_ours:
        return []
    assert kv.eviction is not None
    return [EVICTION_FLAG, kv.eviction]


def host_arguments(argv: Sequence[str], config: Config) -> list[str]:
    """What leaves it to cosched what is copied to host memory, where there is any and nothing else
    is given: SGLang's default is to copy everything."""
    if policy_entry(config.policy).make is None or not config.named_kv().is_ours:
        return []
    if not _given(argv, "--enable-hierarchical-cache") or _given(argv, HOST_WRITE_FLAG):
        return []
    return [HOST_WRITE_FLAG, "write_back"]


def _check_no_gpu_is_left_out() -> None:
    """ConfigError where there is a GPU that torch cannot use: a server would run on the CPU, and
    nobody would know why it is slow."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if not listed.stdout.startswith("GPU"):
        return
    import torch

    built = torch.version.cuda
    reason = (
        f"torch {torch.__version__} is built without CUDA; install its CUDA build (scripts/setup "
        "says how)"
        if built is None
        else f"torch, built for CUDA {built}, sees none: is the driver too old for it?"
    )
    raise ConfigError(
        f"nvidia-smi lists a GPU, but {reason}. To serve on the CPU all the same, give --device cpu"
    )


def _value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value given for one of `flags`, as ``--flag value`` or ``--flag=value``."""
    value = None
    for index, argument in enumerate(argv):
        name, _, inline = argument.partition("=")
        if name in flags:
            value = inline or (argv[index + 1] if index + 1 < len(argv) else None)
    return value


def bind_cpu_threads(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Give each rank of a CPU server its own share of the cores, and leave one to the rest.

    SGLang shares them by NUMA node, and stops when there are more ranks than nodes. One core is for
    the tokenizer, the detokenizer and the clients: with a compute thread on every core, each of its
    barriers waits for a thread that they keep from running.
    """
    if cosched.bootstrap.has_cuda():
        return
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
    if _CPU_BINDING in environ:
        return
    ranks = int(_value(argv, "--tp", "--tp-size", "--tensor-parallel-size") or 1)
    ranks *= int(_value(argv, "--dp", "--dp-size", "--data-parallel-size") or 1)
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or ranks > len(cores):
        return
    shares = [
        cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        for rank in range(ranks)
    ]
    environ[_CPU_BINDING] = "|".join(",".join(map(str, share)) for share in shares)


def _given(argv: Sequence[str], *flags: str) -> bool:
    return any(arg.split("=", 1)[0] in flags for arg in argv)


_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("disaggregation_mode", "null", "prefill/decode disaggregation has no shared iteration"),
    ("pp_size", 1, "pipeline parallelism plans several micro-batches at once"),
    ("speculative_algorithm", None, "speculative decoding makes tokens per iteration unknown"),
    ("dllm_algorithm", None, "diffusion language models have no decode iterations"),
    ("enable_pdmux", False, "PD multiplexing schedules prefill and decode on its own"),
    ("enable_prefill_delayer", False, "the prefill delayer would undo the plan"),
    ("min_free_slots_delay", None, "the slot delay would undo the plan"),
    ("prefill_decode_interval", 0, "for so many iterations after a prefill nobody would plan"),
    ("enable_hisparse", False, "HiSparse moves requests between prefill and decode on its own"),
    ("enable_priority_scheduling", False, "the policy orders the requests itself"),
    ("disable_radix_cache", False, "stopped requests keep their KV in the radix cache"),
    ("enable_session_radix_cache", False, "session caches hold KV outside the plan"),
)
"""Those of `refused_arguments` that every version has."""


def check_arguments(server_args: Any, config: Config) -> None:
    """ConfigError, one sentence, when the arguments cannot go with a planning policy.

    Looks at what SGLang has made of them: a model or another flag may decide what was not given.
    """
    if policy_entry(config.policy).make is None:
        return
    resolved = _resolved(server_args)
    for name, expected, why in refused_arguments():
        value = getattr(resolved, name)
        if value != expected and not (expected in (False, None) and not value):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value} cannot go with --cosched-policy {config.policy}: {why}; "
                f"drop the flag or use --cosched-policy sglang"
            )
    order = resolved.radix_eviction_policy
    kv = config.named_kv()
    expected = "lru" if kv.is_ours else kv.eviction
    if order != expected:
        raise ConfigError(
            f"{EVICTION_FLAG} {order} cannot go with kv.eviction {kv.eviction!r}: drop the "
            f"flag, or set kv.eviction to {choices(ENGINE_ORDERS)}"
        )
    if config.kv.bidirectional_pages:
        _check_shared_pages(resolved)


def _check_shared_pages(resolved: Any) -> None:
    """ConfigError where an online and an offline request cannot share a page."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    from cosched.engine import port

    by_slot = ("torch_native", "triton", "flashinfer")
    others = [name for name in attention_backends_of(resolved) if name not in by_slot]
    reason = None
    if not port.SHARES_PAGES:
        reason = f"they are not tried with SGLang {port.VERSION}"
    elif resolved.page_size == 1:
        reason = "with --page-size 1 a page has one slot, and nothing to share"
    elif others:
        reason = (
            f"attention backend {others[0]} reads whole pages in their order, not slots; give "
            f"--attention-backend {choices(by_slot)}"
        )
    elif resolved.enable_hierarchical_cache:
        reason = "host memory (--enable-hierarchical-cache) copies pages in ascending order"
    elif resolved.tp_size > 1:
        reason = "they are not tried with several ranks (--tp)"
    if reason is not None:
        raise ConfigError(f"kv.bidirectional_pages cannot be had here: {reason}")


def refused_arguments() -> tuple[tuple[str, Any, str], ...]:
    """Server argument, the value cosched works with, and why not another (planning policies
    only)."""
    from cosched.engine import port  # not before SGLang itself

    return (*_REFUSED, (*port.NO_DP_ATTENTION, "DP attention needs one plan for all ranks"))


def check_ports(server_args: Any) -> None:
    """ConfigError when a port that the server will listen on is taken, or is none."""
    resolved = _resolved(server_args)
    _check_port("--port", resolved.host or "127.0.0.1", resolved.port)
    for name in ("nccl_port", "grpc_port"):
        port = getattr(resolved, name)
        if port is not None:
            _check_port("--" + name.replace("_", "-"), "127.0.0.1", port)


def _resolved(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args)


def _check_port(flag: str, host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ConfigError(f"{flag} must be from 1 to 65535, not {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host!r} is no address here: {error.strerror}") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: ports of connections that have just ended are free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                reason = error.strerror
                raise ConfigError(f"cannot listen on {flag} {port} of {host}: {reason}") from None


def check_files(config: Config) -> None:
    """ConfigError when a file that the server will read or write cannot be."""
    for flag, path in (
        ("--decision-log", config.decision_log),
        ("--cosched-iteration-log", config.iteration_log),
    ):
        if path is not None:
            _check_writable(flag, Path(path))
    if config.latency_model is not None:
        try:
            with open(config.latency_model, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot read --latency-model {config.latency_model!r}: {error.strerror}"
            ) from None
    if config.batches.is_on:
        check_store(config.batches)


def _check_writable(flag: str, path: Path) -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {flag} {str(path)!r}: {error.strerror}") from None
    if not existed:
        path.unlink()
