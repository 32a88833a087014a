"""For a process that is forked, where each fork makes a scheduler: imports SGLang's modules and
hooks them, which is the same for every configuration."""

from __future__ import annotations

from cosched.bootstrap import without_collections  # isort: skip  # before anything of SGLang's

import gc
import logging
import os
from unittest import mock

from cosched.config import ENV_VAR, Config
from cosched_patches.plugin import register

# SGLang imports all models when a scheduler is made, and logs those that lack a package.
logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
try:
    with without_collections():
        from cosched.lab.local_engine import freeze_imports

        freeze_imports()
        with mock.patch.dict(os.environ, {ENV_VAR: Config().to_json()}):
            register()
except SystemExit as error:
    # The fork server ignores modules that it cannot import; then each fork reports why.
    raise ImportError(str(error)) from error

# The garbage collector of a fork does not scan these objects, which would copy them.
gc.collect()
gc.freeze()
