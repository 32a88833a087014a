"""What cosched says of servers with eight H100s: reads ``[[config.json, flags, cosched's
configuration], ...]`` from the standard input, writes a list of `Support` or ``{"error": ...}``."""

import json
import sys
import tempfile
from pathlib import Path

import msgspec

import tests.pretend_gpu  # noqa: F401  # before SGLang
from cosched.config import Config
from cosched.engine.arguments import engine_arguments, resolve
from cosched.engine.support import support
from cosched.errors import ConfigError


def answer(model, flags, config):
    settings = msgspec.convert(config, Config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        argv = ["--model-path", folder, *flags]
        try:
            server_args = resolve(engine_arguments(argv, settings, mixed_chunk=True))
            found = support(server_args, settings)
        except ConfigError as error:
            return {"error": str(error)}
    return found._asdict() | {"verdict": found.verdict()}


if __name__ == "__main__":
    answers = [answer(*one) for one in json.load(sys.stdin)]
    print(json.dumps(answers))
