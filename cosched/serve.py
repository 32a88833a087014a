"""Start an SGLang server with cosched's scheduling.

Every SGLang flag works as in `sglang serve`. cosched's own flags become COSCHED_CONFIG, which the
plugin reads in every process of the server.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first: prepares this process and its children

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from cosched.batch.config import OFF, BatchesConfig
from cosched.batch.opening import check_store, default_folder
from cosched.cli import explained_by, new_app, run
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
from cosched.errors import ConfigError
from cosched.limits.claims import read_claims
from cosched.memory.config import EVICTION_ORDERS, KvConfig
from cosched.policies import policy_entry, policy_names
from cosched.predict.tolerance import TOLERANCE_HELP, TOLERANCE_METAVAR, parse_tolerance

_COMMON_POLICIES = ("cosched", "hygen", "sarathi", "priority", "sglang")
"""Those that `--help` describes; `--help-all` describes all."""


def _about_policies(names: Iterable[str]) -> str:
    return "Policies: how online and offline requests share the engine\n\n" + "\n".join(
        f"* {name}: {policy_entry(name).summary}" for name in names
    )


app = new_app(
    "serve",
    __doc__,
    usage="Usage: cosched serve --model-path MODEL [cosched flags] [any SGLang flag]",
    help_epilogue=_about_policies(_COMMON_POLICIES)
    + "\n\nSGLang's flags work unchanged. --help-all shows them, and all policies.",
)
main = partial(run, "serve")

Name = Annotated[str | None, Parameter(metavar="NAME")]
File = Annotated[str | None, Parameter(metavar="FILE")]


@explained_by(Config, SloConfig, BatchesConfig)
@dataclass(kw_only=True)
class ServeOptions:
    """None: the environment decides, or else the default."""

    policy: Annotated[
        str | None,
        Parameter(
            name="--cosched-policy",
            metavar="NAME",
            help="one of those below, or your own as module:Class",
            show_default=Config().policy,
        ),
    ] = None
    ttft_ms: Annotated[float | None, Parameter(name="--cosched-slo-ttft-ms")] = None
    tpot_ms: Annotated[float | None, Parameter(name="--cosched-slo-tpot-ms")] = None
    claims: Annotated[str | None, Parameter(name="--cosched-claims", metavar="JSON|FILE")] = None
    tolerance: Annotated[
        str | None,
        Parameter(name="--cosched-tolerance", metavar=TOLERANCE_METAVAR, help=TOLERANCE_HELP),
    ] = None
    latency_model: Annotated[
        File, Parameter(name=("--cosched-latency-model", "--latency-model"))
    ] = None
    eviction: Annotated[
        str | None,
        Parameter(
            name="--cosched-kv-eviction",
            metavar="NAME",
            help=f"which KV is evicted first (docs/kv_memory.md): {', '.join(EVICTION_ORDERS)}; "
            "default: the policy's own, value for most",
        ),
    ] = None
    max_offline_waiting: Annotated[int | None, Parameter(name="--cosched-max-offline-waiting")] = (
        None
    )
    folder: Annotated[
        str | None,
        Parameter(
            name="--cosched-batches",
            metavar="FOLDER|URL|off",
            help="where OpenAI's Files and Batches keep their files: a folder, or a URL that "
            "fsspec knows (s3://BUCKET/PATH), which needs the next flag; off: the server has none; "
            "default: a folder in the user's data directory, by model and port",
        ),
    ] = None
    url: Annotated[str | None, Parameter(name="--cosched-batches-url", metavar="URL")] = None
    drain_s: Annotated[float | None, Parameter(name="--cosched-drain-s")] = None
    decision_log: Annotated[File, Parameter(name=("--cosched-decision-log", "--decision-log"))] = (
        None
    )
    iteration_log: Annotated[File, Parameter(name="--cosched-iteration-log")] = None
    cosched_no_mixed_chunk: bool = False
    """do not add --enable-mixed-chunk: prefill and decode then take turns"""
    help_all: bool = False
    """show all policies, and SGLang's flags too"""


@app.default
@dataclass(kw_only=True)
class Serve:
    flags: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, show=False)] = field(
        default=(), kw_only=False
    )
    options: Annotated[ServeOptions, Parameter(name="*")] = field(default_factory=ServeOptions)

    def __call__(self) -> None:
        if self.options.help_all:
            _print_all_help()
            return
        flags = list(self.flags)
        if flags and not flags[0].startswith("-"):
            flags.insert(0, "--model-path")  # `serve MODEL`, as `sglang serve` takes it
        config = config_from(self.options)
        check_model(flags)
        check_files(config)
        arguments = engine_arguments(
            flags, config, mixed_chunk=not self.options.cosched_no_mixed_chunk
        )
        os.environ[ENV_VAR] = config.to_json()
        own = [name for one in app.assemble_argument_collection() for name in one.names]
        check_flags(arguments, own=own)
        bind_cpu_threads(arguments, os.environ)
        _serve(arguments, config)


def config_from(options: ServeOptions) -> Config:
    """The configuration: flags over ``COSCHED_CONFIG`` over defaults. ConfigError if one is bad."""
    base = load_config() or Config()
    given = _given(Config, options)
    if "claims" in given:
        given["claims"] = read_claims(given["claims"], source="--cosched-claims")
    if "tolerance" in given:
        given["tolerance"] = parse_tolerance(given["tolerance"])
    for key, struct in (("slo", SloConfig), ("kv", KvConfig), ("batches", BatchesConfig)):
        try:
            given[key] = msgspec.structs.replace(getattr(base, key), **_given(struct, options))
        except ValueError as error:
            raise ConfigError(f"--cosched-{key}: {error}") from None
    try:
        return msgspec.structs.replace(base, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _given(struct: type[msgspec.Struct], options: ServeOptions) -> dict[str, Any]:
    values = vars(options)
    return {name: values[name] for name in struct.__struct_fields__ if values.get(name) is not None}


def _print_all_help() -> None:
    app.help_epilogue = _about_policies(policy_names())
    app.help_print([])
    engine = engine_parser()
    engine.usage = argparse.SUPPRESS
    engine._optionals.title = "SGLang"
    for action in engine._actions:
        # Written out after the flag, twenty names would be one line of 200 characters.
        if action.choices is not None and len(values := ", ".join(map(str, action.choices))) > 30:
            action.metavar = "NAME"
            action.help = f"{action.help or ''} Choices: {values}.".lstrip()
    print()
    engine.print_help()


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
    """Make each process that SGLang spawns import `cosched.launch_server`, and with it
    `cosched.bootstrap`, before ``sglang``.

    `multiprocessing` imports in a spawned process what ``__main__`` was in its parent. With the
    ``cosched`` script or ``python -m cosched`` that module would not prepare the process. Another
    module that was started with ``python -m`` is left to prepare it.
    """
    main_module = sys.modules["__main__"]
    if main_module.__spec__ is None or main_module.__spec__.name == "cosched.__main__":
        main_module.__spec__ = importlib.util.find_spec("cosched.launch_server")


def check_latency_model(server_args: Any, config: Config) -> None:
    """ConfigError when the latency model is not of this engine. The scheduler checks it again, but
    only after the model is loaded."""
    from sglang.srt.configs.model_config import ModelConfig

    from cosched.engine.identity import given_predictor

    given_predictor(server_args, lambda: ModelConfig.from_server_args(server_args), config)


def _check_plugin_active() -> None:
    """ConfigError when SGLang did not load the plugin, for instance because ``SGLANG_PLUGINS``
    leaves it out: the server would silently be a stock one."""
    from cosched_patches.seam import check_wrapped
    from cosched_patches.seams import SEAMS

    check_wrapped(SEAMS)
