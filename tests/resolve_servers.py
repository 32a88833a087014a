"""What cosched says of servers with GPUs (`tests.pretend_gpu`), asked in a process of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock


def resolve_servers(servers, gpu="H100"):
    """For each server `Support` as a dictionary with its verdict, whether it mixes prefills and
    decodes, and what cosched said; or ``{"error": reason}``.

    A server is ``{"files": {path: contents}, "flags": [...], "config": cosched's, "environment":
    {...}}``. Contents are a text, or written as JSON. ``{folder}`` in a flag is where the files
    are. One process, because importing SGLang takes longest.
    """
    with tempfile.TemporaryDirectory() as cache:
        settings = {"PRETENDED_GPU": gpu, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.resolve_servers"],
            input=json.dumps(servers),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | settings,
        )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def answer(files, flags, config=None, environment=None):
    import msgspec
    from sglang.srt.arg_groups.overrides import attention_backends_of

    from cosched.config import Config
    from cosched.engine.options import ServerFlags
    from cosched.engine.prefix_sharing import why_not_shared
    from cosched.engine.support import resolved_arguments, support
    from cosched.errors import ConfigError

    settings = msgspec.convert(config or {}, Config)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment or {}):
        for name, contents in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
        flags = [flag.replace("{folder}", folder) for flag in flags]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                server_args = ServerFlags(flags).server_args(settings)
            found, resolved = support(server_args, settings), resolved_arguments(server_args)
        except ConfigError as error:
            return {"error": str(error).replace(f"{folder}/", "")}
    return found._asdict() | {
        "verdict": found.verdict(),
        "mixes": resolved.enable_mixed_chunk,
        "why_not_shared": why_not_shared(resolved, settings, attention_backends_of(resolved)),
        "said": [line for line in said.getvalue().splitlines() if line.startswith("cosched:")],
    }


if __name__ == "__main__":
    import tests.pretend_gpu  # noqa: F401  # before SGLang

    answers = [answer(**server) for server in json.load(sys.stdin)]
    print(json.dumps(answers))
