"""Start an SGLang server with cosched's scheduling.

    python -m cosched.launch_server --model-path MODEL [cosched flags] [any SGLang flag]

Every SGLang flag works as in ``python -m sglang.launch_server``. cosched's own flags become
``COSCHED_CONFIG``, which the plugin reads in every process of the server.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first: prepares this process and its children

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cosched.claims import read_claims
from cosched.config import ENV_VAR, Config, SloConfig, load_config
from cosched.engine.arguments import (
    bind_cpu_threads,
    check_arguments,
    check_files,
    check_ports,
    engine_arguments,
)
from cosched.errors import ConfigError, CoschedError
from cosched.kv.config import EVICTION_ORDERS
from cosched.latency.profile_file import Profile
from cosched.policy.registry import policy_entry, policy_names

__all__ = ["main"]


_USAGE = """python -m cosched.launch_server --model-path MODEL
                                       [cosched flags] [SGLang flags]"""


class _HelpFormatter(argparse.HelpFormatter):
    """Flags in one column and their text in another, whatever the flag's length; descriptions keep
    their lines."""

    def __init__(self, prog: str) -> None:
        width = max(shutil.get_terminal_size().columns - 2, 60)
        super().__init__(prog, max_help_position=26, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in text.splitlines())


def build_parser() -> argparse.ArgumentParser:
    """cosched's own flags. SGLang's are parsed by SGLang."""
    parser = argparse.ArgumentParser(
        prog="python -m cosched.launch_server",
        usage=_USAGE,
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    defaults = Config()
    group = parser.add_argument_group(
        "cosched",
        "SGLang's flags follow below and work as ever. --cosched-policy says how\n"
        "online and offline requests share the engine:\n\n" + _policies(),
    )
    group.add_argument("-h", "--help", action="store_true", help="show this and SGLang's flags")
    group.add_argument(
        "--cosched-policy",
        metavar="NAME",
        help=f"one of the above, or one of yours as module:Class (default: {defaults.policy})",
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
        "--cosched-claims",
        metavar="JSON|FILE",
        help="who may claim which class and targets, by API key too (docs/wire.md)",
    )
    group.add_argument(
        "--cosched-latency-model",
        "--latency-model",
        metavar="FILE",
        help="profile of this engine that `python -m cosched.profile measure` wrote, for policies "
        "that predict; without one they learn while they run",
    )
    group.add_argument(
        "--cosched-kv-eviction",
        metavar="NAME",
        help="which KV goes first (docs/kv_memory.md): "
        f"{', '.join(EVICTION_ORDERS)} (default: the policy's own, value for most)",
    )
    group.add_argument(
        "--cosched-max-offline-waiting",
        type=int,
        metavar="N",
        help="most offline requests that wait; those beyond are answered with HTTP 429 and "
        "Retry-After (default: any number)",
    )
    group.add_argument(
        "--cosched-drain-s",
        type=float,
        metavar="S",
        help="after SIGTERM, most seconds that online requests under way may take; offline ones "
        f"are let go at once [s] (default: {defaults.drain_s:g})",
    )
    group.add_argument(
        "--cosched-decision-log",
        "--decision-log",
        metavar="FILE",
        help="write every decision there, for `python -m cosched.explain`",
    )
    group.add_argument(
        "--cosched-iteration-log",
        metavar="FILE",
        help="write the shape and time of every iteration there, one JSON line each",
    )
    group.add_argument(
        "--cosched-no-mixed-chunk",
        action="store_true",
        help="do not add --enable-mixed-chunk: prefill and decode then take turns",
    )
    return parser


def _policies() -> str:
    """Names and summaries in two columns, for a terminal of 80."""
    names = policy_names()
    column = max(map(len, names)) + 2
    return "\n".join(
        textwrap.fill(f"{entry.name:<{column}}{entry.summary}", 74, subsequent_indent=" " * column)
        for entry in map(policy_entry, names)
    )


_PLAIN_FLAGS = {
    "cosched_policy": "policy",
    "cosched_latency_model": "latency_model",
    "cosched_max_offline_waiting": "max_offline_waiting",
    "cosched_drain_s": "drain_s",
    "cosched_decision_log": "decision_log",
    "cosched_iteration_log": "iteration_log",
}
"""Flag -> the key of the configuration that it sets."""


def config_from(flags: argparse.Namespace) -> Config:
    """The configuration: flags over ``COSCHED_CONFIG`` over defaults. ConfigError if one is bad."""
    base = load_config() or Config()
    ttft_ms, tpot_ms = flags.cosched_slo_ttft_ms, flags.cosched_slo_tpot_ms
    try:
        slo = SloConfig(
            ttft_ms=base.slo.ttft_ms if ttft_ms is None else ttft_ms,
            tpot_ms=base.slo.tpot_ms if tpot_ms is None else tpot_ms,
        )
    except ValueError as error:
        raise ConfigError(f"--cosched-slo: {error}") from None
    given = {
        key: value
        for flag, key in _PLAIN_FLAGS.items()
        if (value := getattr(flags, flag)) is not None
    }
    claims = base.claims
    if flags.cosched_claims is not None:
        claims = read_claims(flags.cosched_claims, source="--cosched-claims")
    kv = base.kv
    if flags.cosched_kv_eviction is not None:
        kv = msgspec.structs.replace(kv, eviction=flags.cosched_kv_eviction)
    try:
        return msgspec.structs.replace(base, slo=slo, claims=claims, kv=kv, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _print_help(parser: argparse.ArgumentParser) -> None:
    from sglang.srt.server_args import ServerArgs

    parser.print_help()
    engine = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, formatter_class=_HelpFormatter, add_help=False
    )
    engine._optionals.title = "SGLang"
    ServerArgs.add_cli_args(engine)
    for action in engine._actions:
        # Written out after the flag, twenty names would be one line of 200 characters.
        if action.choices is not None and len(names := ", ".join(map(str, action.choices))) > 30:
            action.metavar = "NAME"
            action.help = f"{action.help or ''} Choices: {names}.".lstrip()
    print()
    engine.print_help()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, start. Exits with 2 and one sentence when the arguments are wrong."""
    parser = build_parser()
    flags, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if flags.help:
        _print_help(parser)
        return
    try:
        config = config_from(flags)
        check_files(config)
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

    from cosched.engine.shutdown import end_on_sigterm

    load_plugins()
    _check_plugin_active()
    server_args = prepare_server_args(arguments)
    check_arguments(server_args, config)
    check_ports(server_args)
    check_latency_model(server_args, config)
    try:
        end_on_sigterm()
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def check_latency_model(server_args: Any, config: Config) -> None:
    """ConfigError when the latency model is not of this engine. The scheduler checks it again, but
    only after the model is loaded."""
    if config.latency_model is None or not policy_entry(config.policy).timed:
        return
    from sglang.srt.configs.model_config import ModelConfig

    from cosched.engine.identity import identity_of

    expected = identity_of(server_args, ModelConfig.from_server_args(server_args))
    Profile.predictor_for(Path(config.latency_model), expected)


def _check_plugin_active() -> None:
    """ConfigError when SGLang did not load the plugin, for instance because ``SGLANG_PLUGINS``
    leaves it out: the server would silently be a stock one."""
    from sglang.version import __version__

    from cosched.versions import nearest_sglang
    from cosched_patches.seam import check_wrapped
    from cosched_patches.seams import seams_for

    check_wrapped(seams_for(nearest_sglang(__version__)))


if __name__ == "__main__":
    main()
