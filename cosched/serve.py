"""Start an SGLang server with cosched's scheduling.

Every SGLang flag works as in `sglang serve`. cosched's own flags become COSCHED_CONFIG, which the
plugin reads in every process of the server.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cosched.batch.config import OFF
from cosched.cli import new_app, run
from cosched.config import ENV_VAR, Config
from cosched.engine.arguments import (
    check_files,
    check_ports,
    engine_parser,
)
from cosched.engine.options import ServerFlags, config_from
from cosched.engine.support import check_arguments, resolved_arguments, why_no_batches
from cosched.errors import ConfigError
from cosched.policies import policy_entry, policy_names

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


@app.default
@dataclass(kw_only=True)
class Serve(ServerFlags):
    def __call__(self) -> None:
        import cosched.bootstrap  # noqa: F401  # prepares this process for SGLang

        if self.options.help_all:
            _print_all_help()
            return
        config = config_from(self.options)
        check_files(config)
        server_args = self.server_args(config)
        _check_plugin_active()
        check_arguments(server_args, config)
        check_ports(server_args)
        check_latency_model(server_args, config)
        resolved = resolved_arguments(server_args)
        os.environ[ENV_VAR] = with_batches(config, resolved).to_json()
        _serve(server_args)


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


def _serve(server_args: Any) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    from cosched.server.shutdown import end_on_sigterm

    _import_first_in_children()
    try:
        end_on_sigterm()
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def with_batches(config: Config, resolved: Any) -> Config:
    """With a folder for batches unless the configuration names one. Where the default folder cannot
    be used, the server says why and has no batches."""
    from cosched.batch.open_store import check_store, default_folder

    if config.batches.folder is not None:
        return config
    if why_no_batches(resolved, config.batches) is not None:  # the start line says so
        return msgspec.structs.replace(
            config, batches=msgspec.structs.replace(config.batches, folder=OFF)
        )
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

    from cosched.engine.identity import calibrator_of

    calibrator_of(server_args, lambda: ModelConfig.from_server_args(server_args), config)


def _check_plugin_active() -> None:
    """ConfigError when SGLang did not load the plugin, for instance because ``SGLANG_PLUGINS``
    leaves it out: the server would silently be a stock one."""
    from cosched_patches.seam import check_wrapped
    from cosched_patches.seams import SEAMS

    check_wrapped(SEAMS)
