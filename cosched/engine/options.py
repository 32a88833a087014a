"""The flags of ``cosched serve``: cosched's become a configuration, the others go to SGLang."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from cosched.batch.config import BatchesConfig
from cosched.cli import Words, explained_by, new_app
from cosched.config import ENV_VAR, Config, SharedPrefixConfig, SloConfig, load_config
from cosched.engine.arguments import (
    bind_cpu_threads,
    check_flags,
    check_model,
    engine_arguments,
    key_arguments,
    resolve,
)
from cosched.engine.support import resolved_arguments, why_mixing_is_slow
from cosched.errors import ConfigError
from cosched.limits.claims import read_claims
from cosched.memory.config import KvConfig
from cosched.policies import EVICTION_NAMES
from cosched.predict.tolerance import TOLERANCE_HELP, TOLERANCE_METAVAR, parse_tolerance

Name = Annotated[str | None, Parameter(metavar="NAME")]
File = Annotated[str | None, Parameter(metavar="FILE")]


@explained_by(Config, SloConfig, BatchesConfig, SharedPrefixConfig)
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
            help=f"which KV is evicted first (docs/architecture.md): {', '.join(EVICTION_NAMES)}; "
            "default: the policy's own, value for most",
        ),
    ] = None
    max_offline_waiting: Annotated[int | None, Parameter(name="--cosched-max-offline-waiting")] = (
        None
    )
    mode: Annotated[
        Literal["off", "auto", "on"] | None,
        Parameter(name="--cosched-shared-prefix", show_default=SharedPrefixConfig().mode),
    ] = None
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
    cosched_no_mixed_chunk: bool = False
    """do not add --enable-mixed-chunk: prefill and decode then take turns, as they do with the
    attention backend triton anyway"""
    help_all: bool = False
    """show all policies, and SGLang's flags too"""


@dataclass(kw_only=True)
class ServerFlags:
    """A server as its user names it."""

    flags: Words = field(default=(), kw_only=False)
    options: Annotated[ServeOptions, Parameter(name="*")] = field(default_factory=ServeOptions)

    def server_args(self, config: Config) -> Any:
        """SGLang's arguments: those given and what cosched adds, resolved. ConfigError."""
        flags = list(self.flags)
        if flags and not flags[0].startswith("-"):
            flags.insert(0, "--model-path")  # `serve MODEL`, as `sglang serve` takes it
        check_model(flags)
        flags += key_arguments(flags, os.environ)
        from sglang.srt.plugins import load_plugins

        os.environ[ENV_VAR] = config.to_json()
        mixed_chunk = not self.options.cosched_no_mixed_chunk
        arguments = engine_arguments(flags, config, mixed_chunk=mixed_chunk)
        command = new_app("server")
        command.default(ServerFlags)
        own = [name for one in command.assemble_argument_collection() for name in one.names]
        check_flags(arguments, own=own)
        bind_cpu_threads(arguments, os.environ)
        load_plugins()
        unmixed = engine_arguments(flags, config, mixed_chunk=False)
        try:
            server_args = resolve(arguments)
            reason = why_mixing_is_slow(server_args)
        except ConfigError as error:
            reason = str(error)
            if unmixed == arguments or not re.search("mixed.?(chunk|prefill)", reason):
                raise
        if reason is None:
            return server_args
        if unmixed != arguments:  # the user did not give the flag
            server_args = resolve(unmixed)
        if resolved_arguments(server_args).enable_mixed_chunk:  # perhaps in the file of --config
            note = "warning: --enable-mixed-chunk makes chat and jobs slower here"
        else:
            note = "prefill and decode take turns (no --enable-mixed-chunk)"
        print(f"cosched: {note}: {reason}", file=sys.stderr)
        return server_args


def config_from(options: ServeOptions) -> Config:
    """The configuration: flags over ``COSCHED_CONFIG`` over defaults. ConfigError if one is bad."""
    base = load_config() or Config()
    given = _given(Config, options)
    if "claims" in given:
        given["claims"] = read_claims(given["claims"], source="--cosched-claims")
    if "tolerance" in given:
        given["tolerance"] = parse_tolerance(given["tolerance"])
    parts: dict[str, type[msgspec.Struct]] = {
        "slo": SloConfig,
        "kv": KvConfig,
        "batches": BatchesConfig,
        "shared_prefix": SharedPrefixConfig,
    }
    for key, struct in parts.items():
        try:
            given[key] = msgspec.structs.replace(getattr(base, key), **_given(struct, options))
        except ValueError as error:
            raise ConfigError(f"--cosched-{key.replace('_', '-')}: {error}") from None
    try:
        return msgspec.structs.replace(base, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _given(struct: type[msgspec.Struct], options: ServeOptions) -> dict[str, Any]:
    values = vars(options)
    return {name: values[name] for name in struct.__struct_fields__ if values.get(name) is not None}
