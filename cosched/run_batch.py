"""`python -m cosched.run_batch -i in.jsonl -o out.jsonl`: answer a file of requests, all offline.

The file is in the OpenAI batch format. docs/api.md says how to use it and what it writes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial

from cosched.batch.jsonl.call import ExitCode, fetch, run_job, show_batches, validate
from cosched.batch.jsonl.config import DEFAULT_BASE_URL, VIAS, JobConfig, normal_base_url
from cosched.batch.jsonl.lines import URLS
from cosched.batch.jsonl.server import check_flags
from cosched.command_line import Parser, add_field_option
from cosched.errors import CoschedError

_API_KEY_VARIABLE = "COSCHED_API_KEY"

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
it goes on by itself; this call waits, or does not (--detach). Later commands, each with -o OUT:
    cosched batch status    how far it is
    cosched batch cancel    end it
    cosched batch fetch     write what is answered

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
    add_field_option(parser, JobConfig, "api_key", metavar="KEY")
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


def _window(text: str) -> str:
    """A type of an option: a completion window of the Batch API."""
    from cosched.batch.api import window_seconds
    from cosched.batch.errors import ApiError

    try:
        window_seconds(text)
    except ApiError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cosched.run_batch",
        usage="%(prog)s -i IN.jsonl -o OUT.jsonl [options] [-- SGLANG_FLAGS]",
        description="Answer a JSONL file of OpenAI requests as offline work, beside online "
        "requests on the same server or on a server of its own.",
        epilog=_EPILOG,
    )
    add = partial(add_field_option, parser.add_argument_group("files"), JobConfig)
    add("input", "-i", "--input", metavar="PATH")
    add("out", "-o", "--output", metavar="PATH", required=False)
    add("errors", metavar="PATH")
    add("ordered")
    add("overwrite")
    add("retry_failed")
    add("max_line_bytes", type=int, metavar="N")
    parser.add_argument(
        "--validate", action="store_true", help="check all lines, send nothing, write no file"
    )
    add = partial(add_field_option, parser.add_argument_group("server"), JobConfig)
    add("base_url", metavar="URL", default=None)
    add("api_key", metavar="KEY")
    add("via", choices=VIAS)
    add("window", type=_window, metavar="W")
    add("detach")
    add("require_offline")
    add("wait_s", type=float, metavar="S")
    add("model_path", metavar="PATH")
    add("port", type=int, metavar="N")
    add("start_timeout_s", "--start-timeout", type=float, metavar="S")
    add = partial(add_field_option, parser.add_argument_group("sending"), JobConfig)
    add("concurrency", type=int, metavar="N")
    add("timeout_s", "--timeout", type=float, metavar="S")
    add("max_wait_s", "--max-wait", type=float, metavar="S")
    add("max_retries", "--retries", type=int, metavar="N")
    add("progress_every_s", "--progress-every", type=float, metavar="S")
    add("seed", type=int, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
