"""`python -m cosched.run_batch -i in.jsonl -o out.jsonl`: answer a file of requests, all offline.

The file is in the OpenAI batch format. docs/run_batch.md says how to use it and what it writes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from cosched.command_line import Parser, add_version_option
from cosched.errors import CoschedError
from cosched.jobs.call import ExitCode, fetch, run_job, show_batches, validate
from cosched.jobs.config import (
    ABSENT_WAIT_S,
    DEFAULT_BASE_URL,
    VIAS,
    JobConfig,
    normal_base_url,
)
from cosched.jobs.lines import URLS
from cosched.jobs.server import check_flags

__all__ = ["main"]

_API_KEY_VARIABLE = "COSCHED_API_KEY"
_DEFAULTS = JobConfig(input="", out="")

_COMMANDS = {
    "status": "How far the server is with a job that was started with --detach, or interrupted.",
    "cancel": "Have the server end it. What is answered by then can be fetched.",
    "fetch": "Write what the server has answered: the results of those batches that have ended.",
}

_EPILOG = f"""
Each input line is {{"custom_id": "...", "method": "POST", "url": "...", "body": {{...}}}}
with one of the urls {", ".join(URLS)}.

resuming: stop it in any way (Ctrl-C, SIGTERM, kill -9) and give the same command again: it goes on
where it was, and no line is lost or written twice. --retry-failed sends failed lines once more.

as batches of the server: where it has them (--cosched-batches), the lines are uploaded to it, and
it goes on by itself; this call waits, or does not (--detach). `run_batch status|cancel|fetch -o
OUT` later asks how far it is, ends it, writes what is there.

exit codes:
    0  every line is answered
    1  finished, but some lines failed: see the error file
    2  bad usage, or a file that cannot be read or written
    4  status, fetch: the server is not done with it yet
    3  the server was unreachable for too long, died, or cannot do this
   70  a bug in run_batch
  130  interrupted; the same command resumes
"""


def main(argv: Sequence[str] | None = None) -> int:
    # Until the job itself handles signals, SIGTERM ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments and arguments[0] in _COMMANDS:
            return _of_detached(arguments[0], arguments[1:])
        options, server_flags = _parse(arguments)
        config = _config(options, server_flags)
        return validate(config) if options.validate else run_job(config)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command resumes", ExitCode.INTERRUPTED)
    except CoschedError as error:
        return _fail(str(error), ExitCode.BAD_USAGE)
    except Exception:
        # Python's own exit code for this is 1, which here means that the job finished.
        traceback.print_exc()
        return _fail("this is a bug in run_batch; the same command resumes", ExitCode.BUG)


def _of_detached(command: str, arguments: list[str]) -> int:
    """``status``, ``cancel`` and ``fetch``: of a job that the server goes on with."""
    parser = Parser(
        prog=f"python -m cosched.run_batch {command}",
        usage="%(prog)s -o OUT.jsonl [--api-key KEY]",
        description=_COMMANDS[command],
    )
    parser.add_argument(
        "-o", "--output", dest="out", required=True, metavar="PATH", help="as it was started with"
    )
    _add_api_key(parser)
    options = parser.parse_args(arguments)
    key = options.api_key or os.environ.get(_API_KEY_VARIABLE)
    config = JobConfig(input="", out=options.out, api_key=key)
    if command == "fetch":
        return fetch(config)
    return show_batches(config, cancels=command == "cancel")


def _fail(message: str, code: ExitCode) -> int:
    print(f"run_batch: {message}", file=sys.stderr, flush=True)
    return code


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what follows `--`: flags for the job's own server."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:end])
    if options.out is None and not options.validate:
        parser.error("-o/--output is missing (only --validate does without)")
    if options.model_path is not None and options.base_url is not None:
        parser.error("--model-path starts a server and --base-url names one: give one of them")
    return options, arguments[end + 1 :]


def _config(options: argparse.Namespace, server_flags: list[str]) -> JobConfig:
    check_flags(server_flags)
    given = {name: value for name, value in vars(options).items() if name != "validate"}
    given["out"] = options.out or ""
    given["base_url"] = normal_base_url(options.base_url or DEFAULT_BASE_URL)
    given["api_key"] = options.api_key or os.environ.get(_API_KEY_VARIABLE)
    return JobConfig(**given, server_flags=tuple(server_flags))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cosched.run_batch",
        usage="%(prog)s -i IN.jsonl -o OUT.jsonl [options] [-- SGLANG_FLAGS]",
        description="Answer a JSONL file of OpenAI requests as offline work, beside online "
        "requests on the same server or on a server of its own.",
        epilog=_EPILOG,
    )
    add_version_option(parser)
    _add_files(parser)
    _add_server(parser)
    _add_sending(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("-i", "--input", required=True, metavar="PATH", help="requests (JSONL)")
    group.add_argument("-o", "--output", dest="out", metavar="PATH", help="answers (JSONL)")
    group.add_argument(
        "--errors", metavar="PATH", help="failed lines (JSONL; default: OUT.errors.jsonl)"
    )
    group.add_argument(
        "--ordered",
        action="store_true",
        help="write answers in the order of the input; default: as they are finished. One slow "
        "line then holds back at most 4 x concurrency others",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew: empty OUT and the error file. Default: go on where they end",
    )
    group.add_argument(
        "--retry-failed",
        action="store_true",
        help="send the lines that failed in earlier calls again, with those that are still open; "
        "their errors are kept in the error file's name with .before-retry",
    )
    group.add_argument(
        "--max-line-bytes",
        type=int,
        default=_DEFAULTS.max_line_bytes,
        metavar="N",
        help="a longer line is an error of that line (default: %(default)s)",
    )
    group.add_argument(
        "--validate", action="store_true", help="check all lines, send nothing, write no file"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", help=f"a server that runs (default: {DEFAULT_BASE_URL})"
    )
    _add_api_key(group)
    group.add_argument(
        "--via",
        choices=VIAS,
        default=_DEFAULTS.via,
        help="how lines get there: uploaded as batches of the server, or one by one; auto: as "
        "batches where it has them (default: %(default)s)",
    )
    group.add_argument(
        "--window",
        default=_DEFAULTS.window,
        metavar="W",
        help="completion window of the batches: 30m, 6h, 2d (default: %(default)s)",
    )
    group.add_argument(
        "--detach", action="store_true", help="upload, and do not wait for the results"
    )
    group.add_argument(
        "--require-offline",
        action="store_true",
        help="refuse a server that would take these requests for chat (default: a warning)",
    )
    group.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        help="how long to wait at the start where no server listens yet "
        f"(default: {ABSENT_WAIT_S:g})",
    )
    group.add_argument(
        "--model-path",
        metavar="PATH",
        help="start a server for this job and stop it at the end; SGLang's own flags go after --; "
        "its log is OUT.server.log",
    )
    group.add_argument(
        "--port", type=int, metavar="N", help="port of that server (default: a free one)"
    )
    group.add_argument(
        "--start-timeout",
        dest="start_timeout_s",
        type=float,
        default=_DEFAULTS.start_timeout_s,
        metavar="S",
        help="how long that server may take to start (default: %(default)g)",
    )


def _add_api_key(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key (default: ${_API_KEY_VARIABLE})"
    )


def _add_sending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument(
        "--concurrency",
        type=int,
        default=_DEFAULTS.concurrency,
        metavar="N",
        help="requests at the server at a time (default: %(default)s). They wait in its offline "
        "pool: many give it a choice, for instance of requests that share a prefix",
    )
    group.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        metavar="S",
        help="a line fails when one try takes longer (default: no limit; offline requests may "
        "wait for hours)",
    )
    group.add_argument(
        "--max-wait",
        dest="max_wait_s",
        type=float,
        default=_DEFAULTS.max_wait_s,
        metavar="S",
        help="give up when the server has been unreachable for this long (default: %(default)g)",
    )
    group.add_argument(
        "--retries",
        dest="max_retries",
        type=int,
        default=_DEFAULTS.max_retries,
        metavar="N",
        help="how often a line is sent again after a 500 or an aborted answer (default: "
        "%(default)s). A server that is down or full costs no retries",
    )
    group.add_argument(
        "--progress-every",
        dest="progress_every_s",
        type=float,
        default=_DEFAULTS.progress_every_s,
        metavar="S",
        help="seconds between progress lines when stderr is no terminal (default: %(default)g)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=_DEFAULTS.seed,
        metavar="N",
        help="of the random part of the waits between tries (default: %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main())
