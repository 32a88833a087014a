"""SGLang's web application in one of several HTTP processes (``--tokenizer-worker-num``).

Each of them imports its application by the path in ``SGLANG_HTTP_SERVER_APP_PATH``, before anything
loads plugins. `cosched_patches.http.check_server` sets that path to this module.
"""

from __future__ import annotations

import cosched.bootstrap  # noqa: F401  # before sglang

from sglang.srt.entrypoints.http_server import app  # isort: skip
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id, read_from_shared_memory
from sglang.srt.plugins import load_plugins

__all__ = ["app"]


def _prepare() -> None:
    load_plugins()
    from cosched_patches.http import prepare_app

    _, server_args, _ = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    prepare_app(server_args)


_prepare()
