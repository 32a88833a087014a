"""SGLang's command line: what cosched adds to it, and what it refuses."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import socket
import subprocess
from collections.abc import Collection, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx

from cosched.config import Config
from cosched.engine.support import EVICTION_FLAG, resolved_arguments
from cosched.errors import ConfigError
from cosched.policies import policy_entry

HOST_WRITE_FLAG = "--hicache-write-policy"
_TP_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")

_MODEL_FLAGS = ("--model-path", "--model")
_MODEL_CONFIGS = ("config.json", "params.json")  # of Hugging Face, and of Mistral
_DP_ATTENTION = ("--enable-dp-attention", "--attn-dp-size", "--attention-data-parallel-size")
_UNMIXED_BACKENDS = ("flashmla_sparse_q8",)
_HUB_TIMEOUT_S = 5.0
_CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_KEYS = {"COSCHED_ADMIN_API_KEY": "--admin-api-key", "COSCHED_API_KEY": "--api-key"}


def engine_arguments(argv: Sequence[str], config: Config, *, mixed_chunk: bool) -> list[str]:
    """SGLang's arguments with the flags of the policy, and without a GPU those of the CPU engine.
    Flags that the user gave are kept."""
    import cosched.bootstrap

    arguments = list(argv)
    entry = policy_entry(config.policy)
    for flag, argument in entry.arguments().items():
        if not _given(argv, flag) and (mixed_chunk or flag != "--enable-mixed-chunk"):
            arguments += argument
    arguments += kv_arguments(argv, config)
    if entry.make is not None and not _given(argv, "--prefill-decode-interval"):
        arguments += ["--prefill-decode-interval", "0"]  # SGLang's default depends on the model
    device = _value(argv, "--device")
    if not cosched.bootstrap.has_cuda() and device in (None, "cpu"):
        if device is None:
            _check_no_gpu_is_left_out()
            arguments += ["--device", "cpu"]
        if not _given(argv, "--attention-backend"):
            arguments += ["--attention-backend", "torch_native"]
        if not _given(argv, "--mem-fraction-static", "--max-total-tokens"):
            arguments += ["--max-total-tokens", "65536"]
        if not _given(argv, "--sleep-on-idle", *_DP_ATTENTION):
            # Else an idle scheduler keeps a core busy. With DP attention all ranks would wait for
            # one that sleeps.
            arguments.append("--sleep-on-idle")
    return arguments


def key_arguments(argv: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """SGLang's flags for API keys that environment variables hold, or files that they name: of a
    command line each user of the machine may see the flags. The variables are removed, so that
    processes of the server do not inherit them. ConfigError if one is empty, cannot be read, or is
    given in two ways."""
    arguments = []
    for variable, flag in _KEYS.items():
        ways = [one for one in (variable, f"{variable}_FILE") if one in environ]
        if not ways:
            continue
        ways += [flag] if _given(argv, flag) else []
        if len(ways) > 1:
            raise ConfigError(f"one key is given by {' and '.join(ways)}; keep one of them")
        value = environ.pop(ways[0])
        if ways[0].endswith("_FILE"):
            try:
                value = Path(value).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is no text"
                raise ConfigError(f"cannot read {ways[0]} {value!r}: {reason}") from None
        if not value.strip():
            raise ConfigError(f"{ways[0]} has no key: unset it, or write one")
        arguments.append(f"{flag}={value.strip()}")
    return arguments


def kv_arguments(argv: Sequence[str], config: Config) -> list[str]:
    """The flags by which cosched chooses what SGLang evicts, or SGLang does in the configured
    order, and by which cosched chooses what is copied to host memory (SGLang copies everything)."""
    kv = config.named_kv()
    if policy_entry(config.policy).make is None:
        return []
    assert kv.eviction is not None
    # Some models set SGLang's order where none is given.
    order = "lru" if kv.is_ours else kv.eviction
    flags = [] if _given(argv, EVICTION_FLAG) else [EVICTION_FLAG, order]
    has_host = _given(argv, "--enable-hierarchical-cache") and not _given(argv, *_TP_FLAGS)
    if kv.is_ours and has_host and not _given(argv, HOST_WRITE_FLAG):
        flags += [HOST_WRITE_FLAG, "write_back"]
    return flags


def _check_no_gpu_is_left_out() -> None:
    """ConfigError if there is a GPU that torch cannot use: the server would be slow on the CPU, and
    nothing would say why."""
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

    reason = (
        f"torch {torch.__version__} is built without CUDA; install its CUDA build (scripts/setup "
        "says how)"
    )
    if torch.version.cuda is not None:
        reason = f"torch, built for CUDA {torch.version.cuda}, sees none: is the driver too old?"
    raise ConfigError(
        f"nvidia-smi lists a GPU, but {reason}. To serve on the CPU, give --device cpu"
    )


def _value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value given for one of `flags`, as ``--flag value`` or ``--flag=value``."""
    value = None
    for index, argument in enumerate(argv):
        name, _, inline = argument.partition("=")
        if name in flags:
            value = inline or (argv[index + 1] if index + 1 < len(argv) else None)
    return value


def check_model(argv: Sequence[str]) -> None:
    """ConfigError if no model is named, if the named folder has none, or if it is a name on Hugging
    Face, which cannot be reached. SGLang checks the rest, and URLs."""
    model = _value(argv, *_MODEL_FLAGS)
    if model is None:
        if not _given(argv, *_MODEL_FLAGS, "--config"):
            raise ConfigError(
                "no model: --model-path takes a folder, or a name on Hugging Face such as "
                "meta-llama/Llama-3.1-8B-Instruct"
            )
        return
    path = Path(model)
    if "://" in model or path.is_file():
        return
    if not path.exists():
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            raise ConfigError(f"--model-path {model!r} does not exist")
        _check_hub(model)
    elif not any((path / name).exists() for name in _MODEL_CONFIGS):
        raise ConfigError(f"--model-path {model!r} is no model: it has no config.json")


def _check_hub(model: str) -> None:
    """ConfigError if a model is neither in Hugging Face's cache nor can be loaded into it. SGLang
    would try for most of a minute."""
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        if any(isinstance(try_to_load_from_cache(model, name), str) for name in _MODEL_CONFIGS):
            return
    except ValueError:  # it cannot be a name there
        raise ConfigError(f"--model-path {model!r} does not exist") from None
    where = f"--model-path {model!r} is no folder here and not in Hugging Face's cache"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{where}, and HF_HUB_OFFLINE is set")
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except httpx.TransportError as error:
        raise ConfigError(f"{where}, and {constants.ENDPOINT} cannot be reached: {error}") from None


class _EngineParser(argparse.ArgumentParser):
    """SGLang's flags, with errors that are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help-all lists SGLang's flags)")


def engine_parser() -> argparse.ArgumentParser:
    """The parser of SGLang's command line. Imports SGLang."""
    import cosched.bootstrap

    with cosched.bootstrap.without_collections():
        from sglang.srt.server_args import ServerArgs

    parser = _EngineParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def check_flags(argv: Sequence[str], *, own: Collection[str]) -> None:
    """ConfigError if SGLang does not know a flag or refuses its value. own: cosched's flags, which
    a wrong one may resemble."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = engine_parser()
    arguments = list(argv)
    if "--config" in arguments:
        try:
            arguments = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config: {_first_line(error)}") from None
    # SGLang parses them again and then warns about deprecated flags.
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_flag(unknown[0], {*own, *parser._option_string_actions}))
    for flag, size in (("--tp-size", parsed.tp_size), ("--dp-size", parsed.dp_size)):
        if size < 1:
            raise ConfigError(f"{flag} must be at least 1, not {size}")


def _unknown_flag(argument: str, known: Collection[str]) -> str:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r} (a model is named with --model-path)"
    near = difflib.get_close_matches(flag, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown flag {flag}{hint} (--help lists cosched's flags, --help-all SGLang's too)"


def resolve(argv: Sequence[str]) -> Any:
    """SGLang's server arguments, completed from the model and from each other. ConfigError with
    SGLang's reason if it refuses them; it raises many types of errors."""
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(list(argv))
        server_args.resolve_once()
    except Exception as error:
        model = _value(argv, *_MODEL_FLAGS)
        raise ConfigError(f"SGLang refuses model {model!r}: {_first_line(error)}") from error
    resolved = resolved_arguments(server_args)
    if resolved.enable_mixed_chunk and resolved.dsa_prefill_backend in _UNMIXED_BACKENDS:
        # SGLang raises that when the weights are loaded, and the server ends.
        raise ConfigError(
            f"--dsa-prefill-backend {resolved.dsa_prefill_backend} does not support "
            "--enable-mixed-chunk"
        )
    return server_args


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def bind_cpu_threads(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Divide the cores among the ranks of a CPU server, except one.

    SGLang divides them by NUMA node, and fails if there are more ranks than nodes. One core is left
    to the tokenizer, the detokenizer and the clients: with a compute thread on every core, each
    barrier of the computation would wait for a thread that they interrupt.
    """
    import cosched.bootstrap

    if cosched.bootstrap.has_cuda():
        return
    cores = sorted(os.sched_getaffinity(0))
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) - 1)))
    ranks = int(_value(argv, "--tp", "--tp-size", "--tensor-parallel-size") or 1)
    if not _given(argv, *_DP_ATTENTION):  # there --dp divides the ranks of --tp
        ranks *= int(_value(argv, "--dp", "--dp-size", "--data-parallel-size") or 1)
    if _CPU_BINDING in environ or ranks == 1 or ranks > len(cores):
        return
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    shares = [cores[start:end] for start, end in itertools.pairwise(bounds)]
    environ[_CPU_BINDING] = "|".join(",".join(map(str, share)) for share in shares)


def _given(argv: Sequence[str], *flags: str) -> bool:
    return any(arg.split("=", 1)[0] in flags for arg in argv)


def check_ports(server_args: Any) -> None:
    """ConfigError if a port of the server is taken or invalid."""
    resolved = resolved_arguments(server_args)
    _check_port("--port", resolved.host or "127.0.0.1", resolved.port)
    for name in ("nccl_port", "grpc_port"):
        port = getattr(resolved, name)
        if port is not None:
            _check_port("--" + name.replace("_", "-"), "127.0.0.1", port)


def _check_port(flag: str, host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ConfigError(f"{flag} must be from 1 to 65535, not {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host!r} is no address here: {error.strerror}") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            # As the server: the ports of connections that have just ended are free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                reason = error.strerror
                raise ConfigError(f"cannot listen on {flag} {port} of {host}: {reason}") from None


def check_files(config: Config) -> None:
    """ConfigError if the server cannot read or write one of its files."""
    if config.decision_log is not None:
        _check_writable("--decision-log", Path(config.decision_log))
    if config.latency_model is not None:
        try:
            with open(config.latency_model, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot read --latency-model {config.latency_model!r}: {error.strerror}"
            ) from None
    if config.batches.is_on:
        from cosched.batch.callback_rules import callback_rules
        from cosched.batch.open_store import check_store

        check_store(config.batches)
        callback_rules(config.batches)


def _check_writable(flag: str, path: Path) -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {flag} {str(path)!r}: {error.strerror}") from None
    if not existed:
        path.unlink()
