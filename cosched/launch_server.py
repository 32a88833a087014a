"""Start an SGLang server with cosched's scheduling.

    cosched serve --model-path MODEL [cosched flags] [any SGLang flag]

Every SGLang flag works as in ``sglang serve``. cosched's own flags become ``COSCHED_CONFIG``, which
the plugin reads in every process of the server.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first: prepares this process and its children

import argparse
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cosched.batch.config import OFF, BatchesConfig
from cosched.batch.opening import check_store, default_folder
from cosched.command_line import Parser, add_field_option
from cosched.config import ENV_VAR, Config, SloConfig, load_config
from cosched.engine.arguments import (
    bind_cpu_threads,
    check_arguments,
    check_files,
    check_flags,
    check_model,
    check_ports,
    engine_arguments,
    engine_parser,
    resolve,
)
from cosched.errors import ConfigError, CoschedError
from cosched.limits.claims import read_claims
from cosched.memory.config import EVICTION_ORDERS, KvConfig
from cosched.policies import policy_entry, policy_names
from cosched.predict.profile_file import Profile
from cosched.predict.tolerance import TOLERANCE_HELP, TOLERANCE_METAVAR, parse_tolerance

_COMMON_POLICIES = ("cosched", "hygen", "sarathi", "priority", "sglang")
"""Those that `--help` describes; `--help-all` describes all."""


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
    parser = Parser(
        prog="python -m cosched.launch_server",
        usage="%(prog)s --model-path MODEL [flags]",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=_HelpFormatter,
        add_help=False,
    )
    group = parser.add_argument_group("cosched")
    group.add_argument(
        "-h", "--help", action="store_true", help="show cosched's flags and the common policies"
    )
    group.add_argument(
        "--help-all", action="store_true", help="show all policies, and SGLang's flags too"
    )
    # What is not given is what the environment says.
    add = partial(add_field_option, group, Config, default=None)
    mine = f"one of those below, or one of yours as module:Class (default: {Config().policy})"
    add("policy", "--cosched-policy", metavar="NAME", help=mine)
    for field, metavar in (("ttft_ms", "MS"), ("tpot_ms", "MS")):
        flag = f"--cosched-slo-{field.replace('_', '-')}"
        add_field_option(group, SloConfig, field, flag, default=None, type=float, metavar=metavar)
    add("claims", "--cosched-claims", metavar="JSON|FILE")
    add(
        "tolerance", "--cosched-tolerance", type=str, metavar=TOLERANCE_METAVAR, help=TOLERANCE_HELP
    )
    add("latency_model", "--cosched-latency-model", "--latency-model", metavar="FILE")
    orders = f"which KV goes first (docs/kv_memory.md): {', '.join(EVICTION_ORDERS)} (default: the "
    orders += "policy's own, value for most)"
    flag = "--cosched-kv-eviction"
    add_field_option(group, KvConfig, "eviction", flag, metavar="NAME", help=orders)
    add("max_offline_waiting", "--cosched-max-offline-waiting", type=int, metavar="N")
    flag = "--cosched-batches"
    place = (
        "where OpenAI's Files and Batches keep their files: a folder, or a URL that fsspec knows"
    )
    place += " (s3://BUCKET/PATH), which needs the next flag; off: the server has none (default: a "
    place += "folder in the user's data directory, by model and port)"
    add_field_option(
        group, BatchesConfig, "folder", flag, metavar="FOLDER|URL|off", default=None, help=place
    )
    add_field_option(group, BatchesConfig, "url", f"{flag}-url", metavar="URL", default=None)
    add("drain_s", "--cosched-drain-s", type=float, metavar="S")
    add("decision_log", "--cosched-decision-log", "--decision-log", metavar="FILE")
    add("iteration_log", "--cosched-iteration-log", metavar="FILE")
    group.add_argument(
        "--cosched-no-mixed-chunk",
        action="store_true",
        help="do not add --enable-mixed-chunk: prefill and decode then take turns",
    )
    return parser


def _policies(names: Iterable[str]) -> str:
    """Names and summaries in two columns, for a terminal of 80."""
    entries = [policy_entry(name) for name in names]
    column = max(len(entry.name) for entry in entries) + 2
    return "\n".join(
        textwrap.fill(
            f"  {entry.name:<{column}}{entry.summary}",
            78,
            subsequent_indent=" " * (column + 2),
        )
        for entry in entries
    )


def config_from(flags: argparse.Namespace) -> Config:
    """The configuration: flags over ``COSCHED_CONFIG`` over defaults. ConfigError if one is bad."""
    base = load_config() or Config()
    given = _given(Config, flags)
    try:
        given["slo"] = msgspec.structs.replace(base.slo, **_given(SloConfig, flags))
    except ValueError as error:
        raise ConfigError(f"--cosched-slo: {error}") from None
    if "claims" in given:
        given["claims"] = read_claims(given["claims"], source="--cosched-claims")
    if "tolerance" in given:
        given["tolerance"] = parse_tolerance(given["tolerance"])
    given["kv"] = msgspec.structs.replace(base.kv, **_given(KvConfig, flags))
    try:
        given["batches"] = msgspec.structs.replace(base.batches, **_given(BatchesConfig, flags))
    except ValueError as error:
        raise ConfigError(f"--cosched-batches: {error}") from None
    try:
        return msgspec.structs.replace(base, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _given(struct: type[msgspec.Struct], flags: argparse.Namespace) -> dict[str, Any]:
    values = vars(flags)
    return {name: values[name] for name in struct.__struct_fields__ if values.get(name) is not None}


def _print_help(parser: argparse.ArgumentParser, *, is_all: bool) -> None:
    parser.print_help()
    print("\npolicies: how online and offline requests share the engine")
    names = policy_names() if is_all else _COMMON_POLICIES
    print(_policies(names))
    if not is_all:
        others = len(policy_names()) - len(names)
        print(f"\nSGLang's flags work unchanged. --help-all shows them and {others} more policies.")
        return
    engine = engine_parser()
    engine.usage = argparse.SUPPRESS
    engine.formatter_class = _HelpFormatter
    engine._optionals.title = "SGLang"
    for action in engine._actions:
        # Written out after the flag, twenty names would be one line of 200 characters.
        if action.choices is not None and len(values := ", ".join(map(str, action.choices))) > 30:
            action.metavar = "NAME"
            action.help = f"{action.help or ''} Choices: {values}.".lstrip()
    print()
    engine.print_help()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, start. Exits with 2 and one sentence when the arguments are wrong."""
    parser = build_parser()
    flags, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if flags.help or flags.help_all:
        _print_help(parser, is_all=flags.help_all)
        return
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--model-path")  # `serve MODEL`, as `sglang serve` takes it
    try:
        config = config_from(flags)
        check_model(rest)
        check_files(config)
        arguments = engine_arguments(rest, config, mixed_chunk=not flags.cosched_no_mixed_chunk)
        os.environ[ENV_VAR] = config.to_json()
        check_flags(arguments, own=parser._option_string_actions)
        bind_cpu_threads(arguments, os.environ)
        _serve(arguments, config)
    except CoschedError as error:
        print(f"cosched: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _serve(arguments: list[str], config: Config) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    from cosched.engine.shutdown import end_on_sigterm

    _import_first_in_children()
    load_plugins()
    _check_plugin_active()
    server_args = resolve(arguments)
    check_arguments(server_args, config)
    check_ports(server_args)
    check_latency_model(server_args, config)
    os.environ[ENV_VAR] = with_batches(config, server_args).to_json()
    try:
        end_on_sigterm()
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def with_batches(config: Config, server_args: Any) -> Config:
    """With a folder for batches unless the configuration names one. Where the default folder cannot
    be used, the server says why and has no batches."""
    if config.batches.folder is not None:
        return config
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(server_args)
    try:
        folder = default_folder(model=resolved.served_model_name, port=resolved.port)
        batches = msgspec.structs.replace(config.batches, folder=str(folder))
        check_store(batches)
    except ConfigError as error:
        print(
            f"cosched: the server has no Files and Batches: {error}; --cosched-batches FOLDER "
            "names another place",
            file=sys.stderr,
        )
        batches = msgspec.structs.replace(config.batches, folder=OFF)
    return msgspec.structs.replace(config, batches=batches)


def _import_first_in_children() -> None:
    """Make each process that SGLang spawns import this module, and with it `cosched.bootstrap`,
    before ``sglang``.

    `multiprocessing` imports in a spawned process what ``__main__`` was in its parent. With
    ``python -m cosched.launch_server`` that is this module. With the ``cosched`` script or ``python
    -m cosched`` it would be one that does not prepare the process. Another module that was started
    with ``python -m`` is left to prepare it.
    """
    main_module = sys.modules["__main__"]
    if main_module.__spec__ is None or main_module.__spec__.name == "cosched.__main__":
        main_module.__spec__ = importlib.util.find_spec("cosched.launch_server")


def check_latency_model(server_args: Any, config: Config) -> None:
    """ConfigError when the latency model is not of this engine. The scheduler checks it again, but
    only after the model is loaded."""
    if config.latency_model is None or not policy_entry(config.policy).timed:
        return
    from sglang.srt.configs.model_config import ModelConfig

    from cosched.engine.identity import identity_of

    expected = identity_of(server_args, ModelConfig.from_server_args(server_args))
    Profile.predictor_for(Path(config.latency_model), expected, name=config.predictor)


def _check_plugin_active() -> None:
    """ConfigError when SGLang did not load the plugin, for instance because ``SGLANG_PLUGINS``
    leaves it out: the server would silently be a stock one."""
    from cosched_patches.seam import check_wrapped
    from cosched_patches.seams import SEAMS

    check_wrapped(SEAMS)


if __name__ == "__main__":
    main()
