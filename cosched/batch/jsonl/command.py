"""``cosched batch``: answer a file of requests in the OpenAI batch format, all offline.

docs/api.md says how to use it and what it writes.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from cyclopts import Parameter

from cosched.batch.jsonl.call import ExitCode, fetch, run_job, show_batches, validate
from cosched.batch.jsonl.config import DEFAULT_BASE_URL, JobConfig, normal_base_url
from cosched.batch.jsonl.lines import URLS
from cosched.batch.jsonl.server import check_flags
from cosched.cli import explained_by, new_app, reader, run, section
from cosched.errors import ConfigError, CoschedError

_API_KEY_VARIABLE = "COSCHED_API_KEY"

_ABOUT = """\
Answer a JSONL file of OpenAI requests as offline work.

The work runs beside online requests on the same server, or on a server of its own.

Each input line is {{"custom_id": "...", "method": "POST", "url": "...", "body": {{...}}}} with
one of the urls {urls}.

    cosched batch -i IN.jsonl -o OUT.jsonl [options] [-- SGLANG_FLAGS]
"""

_EPILOGUE = """\
Resuming: stop the command in any way (Ctrl-C, SIGTERM, kill -9) and run it again: it continues
where it was, and no line is lost or written twice. --retry-failed sends failed lines once more.

As batches of the server: if the server has them (--cosched-batches), the lines are uploaded, and
the server continues without this command, which waits, or does not (--detach). `cosched batch
status`, `cancel` and `fetch`, each with -o OUT, show how far the server is, end the work, and write
what is answered.

Exit codes:

      0  every line is answered
      1  finished, but some lines failed: see the error file
      2  wrong usage, or a file that cannot be read or written
      3  the server was unreachable for too long, died, or cannot do this
      4  status, fetch: the server is not done with the file yet
     70  a bug in run_batch
    130  interrupted; the same command resumes
"""

app = new_app("batch", _ABOUT.format(urls=", ".join(URLS)), help_epilogue=_EPILOGUE)
main = partial(run, "batch")

_JOB = JobConfig(input="", out="")
"""For the defaults."""

Key = Annotated[str | None, Parameter(metavar="KEY")]


def _window(text: str) -> str:
    """A completion window of the Batch API."""
    from cosched.batch.api import window_seconds
    from cosched.batch.errors import ApiError

    try:
        window_seconds(text)
    except ApiError as error:
        raise ValueError(str(error)) from None
    return text


_FILES, _SERVER, _SENDING = section("Files"), section("Server"), section("Sending")


@explained_by(JobConfig)
@dataclass(kw_only=True)
class FileOptions:
    input: Annotated[str, Parameter(alias="-i", metavar="PATH")]
    out: Annotated[str | None, Parameter(name="--output", alias="-o", metavar="PATH")] = None
    errors: Annotated[str | None, Parameter(metavar="PATH")] = None
    ordered: bool = False
    overwrite: bool = False
    retry_failed: bool = False
    max_line_bytes: int = _JOB.max_line_bytes


@explained_by(JobConfig)
@dataclass(kw_only=True)
class ServerOptions:
    base_url: Annotated[str | None, Parameter(metavar="URL")] = None
    api_key: Key = None
    via: Literal["auto", "batches", "lines"] = "auto"
    window: Annotated[str | None, Parameter(converter=reader(_window))] = None
    detach: bool = False
    require_offline: bool = False
    wait_s: float | None = None
    model_path: Annotated[str | None, Parameter(metavar="PATH")] = None
    port: int | None = None
    start_timeout_s: Annotated[float, Parameter(name="--start-timeout")] = _JOB.start_timeout_s


@explained_by(JobConfig)
@dataclass(kw_only=True)
class SendingOptions:
    concurrency: int = _JOB.concurrency
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None
    max_wait_s: Annotated[float, Parameter(name="--max-wait")] = _JOB.max_wait_s
    max_retries: Annotated[int, Parameter(name="--retries")] = _JOB.max_retries
    progress_every_s: Annotated[float, Parameter(name="--progress-every")] = _JOB.progress_every_s
    seed: int = 0


class _Command:
    """Calls `execute`, and says how it ended."""

    def execute(self) -> int:
        raise NotImplementedError

    def __call__(self) -> int:
        # Until the job itself handles signals, SIGTERM ends it as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return self.execute()
        except KeyboardInterrupt:
            return _fail("interrupted; the same command resumes", ExitCode.INTERRUPTED)
        except CoschedError as error:
            return _fail(str(error), ExitCode.BAD_USAGE)
        except Exception:
            # Python's own exit code for this is 1, which here means that the job finished.
            traceback.print_exc()
            return _fail("this is a bug in run_batch; the same command resumes", ExitCode.BUG)


def _fail(message: str, code: ExitCode) -> int:
    print(f"run_batch: {message}", file=sys.stderr, flush=True)
    return code


@app.default
@dataclass(kw_only=True)
class Batch(_Command):
    server_flags: Annotated[tuple[str, ...], Parameter(show=False)] = field(
        default=(), kw_only=False
    )
    files: Annotated[FileOptions, _FILES]
    server: Annotated[ServerOptions, _SERVER] = field(default_factory=ServerOptions)
    sending: Annotated[SendingOptions, _SENDING] = field(default_factory=SendingOptions)
    validate: bool = False
    """check all lines, send nothing, write no file"""

    def execute(self) -> int:
        if self.files.out is None and not self.validate:
            raise ConfigError("-o/--output is missing (only --validate does without)")
        if self.server.model_path is not None and self.server.base_url is not None:
            raise ConfigError(
                "--model-path starts a server and --base-url names one: give one of them"
            )
        check_flags(self.server_flags)
        given = vars(self.files) | vars(self.server) | vars(self.sending)
        given["out"] = self.files.out or ""
        given["base_url"] = normal_base_url(self.server.base_url or DEFAULT_BASE_URL)
        given["api_key"] = self.server.api_key or os.environ.get(_API_KEY_VARIABLE)
        config = JobConfig(**given, server_flags=self.server_flags)
        return validate(config) if self.validate else run_job(config)


@dataclass(kw_only=True)
class _Detached(_Command):
    out: Annotated[str, Parameter(name="--output", alias="-o", metavar="PATH")]
    """the output that the job was started with"""
    api_key: Key = None
    """the server's key; default: $COSCHED_API_KEY"""

    def config(self) -> JobConfig:
        key = self.api_key or os.environ.get(_API_KEY_VARIABLE)
        return JobConfig(input="", out=self.out, api_key=key)


@app.command(help_epilogue="")
class Status(_Detached):
    """Show how far the server is with a job that was detached or interrupted."""

    def execute(self) -> int:
        return show_batches(self.config(), cancels=False)


@app.command(help_epilogue="")
class Cancel(_Detached):
    """End the job at the server. What is answered by then can be fetched."""

    def execute(self) -> int:
        return show_batches(self.config(), cancels=True)


@app.command(help_epilogue="")
class Fetch(_Detached):
    """Write what the server has answered: the results of those batches that have ended."""

    def execute(self) -> int:
        return fetch(self.config())
