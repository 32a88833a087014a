"""Import this in a process that others are forked from, each to make a scheduler of its own: what
SGLang imports then is there, and hooked, which is the same for every configuration."""

from __future__ import annotations

from cosched.bootstrap import without_collections  # isort: skip  # before anything of SGLang's

import gc
import logging
import os
from unittest import mock

from cosched.config import ENV_VAR, Config
from cosched_patches.plugin import register

__all__: list[str] = []

# All models are imported when a scheduler is made; those that lack a package are said to.
logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
try:
    with without_collections():
        import sglang.srt.models.registry  # noqa: F401

        import cosched.engine.port.local  # noqa: F401

        with mock.patch.dict(os.environ, {ENV_VAR: Config().to_json()}):
            register()
except SystemExit as error:
    # The fork server goes on without a module that it cannot import, and each fork says why.
    raise ImportError(str(error)) from error

# Forks share these objects: they neither look through them nor, by that, copy them.
gc.collect()
gc.freeze()
