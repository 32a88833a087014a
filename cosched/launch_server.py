"""Start an SGLang server with cosched's scheduling.

    python -m cosched.launch_server --model-path MODEL [cosched flags] [any SGLang flag]

Every SGLang flag works as in ``python -m sglang.launch_server``. cosched's own flags become
``COSCHED_CONFIG``, which the plugin reads in every process of the server.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # first: prepares this process and every spawned one

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec

from cosched.config import ENV_VAR, Config, SloConfig, load_config
from cosched.errors import ConfigError, CoschedError
from cosched.policy.registry import POLICIES, policy_entry

__all__ = ["main"]

_CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"


def build_parser() -> argparse.ArgumentParser:
    """cosched's own flags. SGLang's are parsed by SGLang."""
    parser = argparse.ArgumentParser(
        prog="python -m cosched.launch_server", add_help=False, allow_abbrev=False
    )
    defaults = Config()
    names = "\n".join(f"  {entry.name:<10}{entry.summary}" for entry in POLICIES.values())
    group = parser.add_argument_group("cosched", f"Policies:\n{names}")
    group.add_argument(
        "--cosched-policy",
        choices=sorted(POLICIES),
        help=f"how online and offline requests share the engine (default: {defaults.policy})",
    )
    group.add_argument(
        "--cosched-slo-ttft-ms",
        type=float,
        metavar="MS",
        help="TTFT target of online requests that name none [ms] "
        f"(default: {defaults.slo.ttft_ms:g})",
    )
    group.add_argument(
        "--cosched-slo-tpot-ms",
        type=float,
        metavar="MS",
        help="TPOT target of online requests that name none [ms] "
        f"(default: {defaults.slo.tpot_ms:g})",
    )
    group.add_argument(
        "--cosched-iteration-log",
        metavar="FILE",
        help="write the shape and time of every iteration there, one JSON line each",
    )
    group.add_argument(
        "--decision-log",
        metavar="FILE",
        help="write every decision there, for python -m cosched.explain",
    )
    group.add_argument(
        "--cosched-no-mixed-chunk",
        action="store_true",
        help="do not add --enable-mixed-chunk: prefill and decode then take turns",
    )
    group.add_argument("-h", "--help", action="store_true", help="show this and SGLang's flags")
    return parser


def config_from(flags: argparse.Namespace) -> Config:
    """The configuration: flags over ``COSCHED_CONFIG`` over defaults. ConfigError if one is bad."""
    base = load_config() or Config()
    policy = base.policy if flags.cosched_policy is None else flags.cosched_policy
    ttft_ms, tpot_ms = flags.cosched_slo_ttft_ms, flags.cosched_slo_tpot_ms
    try:
        slo = SloConfig(
            ttft_ms=base.slo.ttft_ms if ttft_ms is None else ttft_ms,
            tpot_ms=base.slo.tpot_ms if tpot_ms is None else tpot_ms,
        )
    except ValueError as error:
        raise ConfigError(f"--cosched-slo: {error}") from None
    log = base.iteration_log if flags.cosched_iteration_log is None else flags.cosched_iteration_log
    decisions = base.decision_log if flags.decision_log is None else flags.decision_log
    try:
        return msgspec.structs.replace(
            base, policy=policy, slo=slo, iteration_log=log, decision_log=decisions
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def engine_arguments(argv: Sequence[str], config: Config, *, mixed_chunk: bool) -> list[str]:
    """SGLang's arguments with what cosched adds: the policy's flags, and the CPU engine's where
    there is no GPU. What the user gave stands."""
    arguments = list(argv)
    for flag, argument in policy_entry(config.policy).arguments().items():
        if flag == "--enable-mixed-chunk" and not mixed_chunk:
            continue
        if not _given(argv, flag):
            arguments += argument
    if not cosched.bootstrap.has_cuda() and not _given(argv, "--device"):
        arguments += ["--device", "cpu"]
        if not _given(argv, "--attention-backend"):
            arguments += ["--attention-backend", "torch_native"]
        if not _given(argv, "--mem-fraction-static", "--max-total-tokens"):
            arguments += ["--max-total-tokens", "65536"]
        if not _given(argv, "--sleep-on-idle"):
            # An idle scheduler would otherwise keep a whole core busy asking for requests.
            arguments.append("--sleep-on-idle")
    return arguments


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
    ("enable_dp_attention", False, "DP attention needs one plan for all ranks"),
    ("enable_pdmux", False, "PD multiplexing schedules prefill and decode on its own"),
    ("enable_prefill_delayer", False, "the prefill delayer would undo the plan"),
    ("min_free_slots_delay", None, "the slot delay would undo the plan"),
    ("enable_hisparse", False, "HiSparse moves requests between prefill and decode on its own"),
    ("enable_priority_scheduling", False, "the policy orders the requests itself"),
    ("disable_radix_cache", False, "stopped requests keep their KV in the radix cache"),
    ("enable_session_radix_cache", False, "session caches hold KV outside the plan"),
)
"""Server argument, the value cosched works with, and why not another (planning policies only)."""


def check_arguments(server_args: Any, config: Config) -> None:
    """ConfigError, one sentence, when the arguments cannot go with a planning policy."""
    if policy_entry(config.policy).make is None:
        return
    for name, expected, why in _REFUSED:
        value = getattr(server_args, name, expected)
        if value != expected and not (expected in (False, None) and not value):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value} cannot go with --cosched-policy {config.policy}: {why}; "
                f"drop the flag or use --cosched-policy sglang"
            )


def _print_help(parser: argparse.ArgumentParser) -> None:
    from sglang.srt.server_args import ServerArgs

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (__doc__ or "").split("\n\n")[0]
    ServerArgs.add_cli_args(parser)
    parser.print_help()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, start. Exits with 2 and one sentence when the arguments are wrong."""
    parser = build_parser()
    flags, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if flags.help:
        _print_help(parser)
        return
    try:
        config = config_from(flags)
        arguments = engine_arguments(rest, config, mixed_chunk=not flags.cosched_no_mixed_chunk)
        os.environ[ENV_VAR] = config.to_json()
        bind_cpu_threads(arguments, os.environ)
        _serve(arguments, config)
    except CoschedError as error:
        print(f"cosched: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _serve(arguments: list[str], config: Config) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    _check_plugin_active()
    server_args = prepare_server_args(arguments)
    check_arguments(server_args, config)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _check_plugin_active() -> None:
    """ConfigError when SGLang did not load the plugin, for instance because ``SGLANG_PLUGINS``
    leaves it out: the server would silently be a stock one."""
    from cosched_patches.seam import check_wrapped
    from cosched_patches.seams import SEAMS

    check_wrapped(SEAMS)


if __name__ == "__main__":
    main()
