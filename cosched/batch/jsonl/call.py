"""One call of run_batch: sets up a job, handles signals, reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from cosched.batch.jsonl.batch_api import ENDED, BatchApi, RemoteBatch
from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.config import JobConfig
from cosched.batch.jsonl.errors import DiskError, JobFileError, ServerGoneError, ServerRefusedError
from cosched.batch.jsonl.journal import Journal, JournalPaths
from cosched.batch.jsonl.line_results import is_wrong_for_good
from cosched.batch.jsonl.lines import BadLine
from cosched.batch.jsonl.prefix_order import LINES_AT_SERVER
from cosched.batch.jsonl.remote import Manifest, RemoteJob, batches_of, load_manifest
from cosched.batch.jsonl.report import Reporter, Snapshot, print_batches, print_report
from cosched.batch.jsonl.runner import Job, JobCounts
from cosched.batch.jsonl.server import (
    OwnServer,
    RunningServer,
    free_port,
    own_base_url,
    server_command,
)
from cosched.batch.jsonl.source import Source, read_source
from cosched.errors import ConfigError, CoschedError

_FILES_BESIDE_CONNECTIONS = 64
_MAX_SHOWN_FAULTS = 20
_WINDOW = "24h"


class ExitCode(IntEnum):
    """What run_batch's exit code says."""

    ANSWERED = 0
    SOME_FAILED = 1
    BAD_USAGE = 2
    SERVER_GONE = 3
    GOING_ON = 4
    BUG = 70
    INTERRUPTED = 130


class _StoppedError(Exception):
    """A signal ended the call in order."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How far a call has come; None: it has not come to that."""

    source: Source | None = None
    journal: Journal | None = None
    counts: JobCounts = field(default_factory=JobCounts)
    is_at_server: bool = False


def run_job(config: JobConfig) -> ExitCode:
    """Run the job until it ends or an error stops it, and report."""
    began_s = time.monotonic()
    progress = _Progress()
    message: str | None
    try:
        exit_code, message = _run(config, progress)
    except KeyboardInterrupt:
        exit_code, message = ExitCode.INTERRUPTED, "interrupted; the same command resumes"
    except _StoppedError as error:
        exit_code, message = ExitCode.INTERRUPTED, str(error)
    except DiskError as error:
        message = f"{error}\nTo resume once it can be written, {_again(config)}"
        exit_code = ExitCode.BAD_USAGE
    except ServerRefusedError as error:
        exit_code, message = ExitCode.SERVER_GONE, str(error)
    except ServerGoneError as error:
        message = f"{error}\nTo resume once it is back, {_again(config)}"
        exit_code = ExitCode.SERVER_GONE
    except CoschedError as error:
        exit_code, message = ExitCode.BAD_USAGE, str(error)
    if message:
        _say(message)
    counts, journal = progress.counts, progress.journal
    seconds = time.monotonic() - began_s
    # Rates are of this call: earlier calls took none of its time.
    num_lines_now = counts.num_answered + counts.num_failed
    num_tokens = counts.prompt_tokens + counts.completion_tokens
    results = {
        "counts": {
            "lines": progress.source.num_lines if progress.source else 0,
            "empty": counts.num_empty,
            "answered": journal.num_answered if journal else 0,
            "failed": journal.num_failed if journal else 0,
            "answered_now": counts.num_answered,
            "failed_now": counts.num_failed,
        },
        "failed_by_code": dict(counts.failed_by_code),
        "seconds": round(seconds, 3),
        "tokens": {"prompt": counts.prompt_tokens, "completion": counts.completion_tokens},
        "lines_per_s": round(num_lines_now / seconds, 3) if seconds else 0.0,
        "tokens_per_s": round(num_tokens / seconds, 3) if seconds else 0.0,
    }
    print_report(exit_code=exit_code, message=message, config=config.as_json(), results=results)
    return exit_code


def _run(config: JobConfig, progress: _Progress) -> tuple[ExitCode, str | None]:
    config = replace(config, concurrency=_allowed_connections(config.concurrency))
    progress.source = source = read_source(config.input)
    paths = JournalPaths(out=config.out, errors=config.errors)
    dropped = None
    if config.overwrite:
        with contextlib.suppress(JobFileError):
            dropped = load_manifest(paths.batches)
    with Journal.open(
        paths=paths,
        source=source,
        ordered=config.ordered,
        max_line_bytes=config.max_line_bytes,
        overwrite=config.overwrite,
        retry_failed=config.retry_failed,
    ) as journal:
        progress.journal = journal
        if journal.num_done:
            _say(
                f"resuming: {journal.num_answered} lines are answered, {journal.num_failed} failed"
                f" ({journal.num_cut_bytes} bytes of unfinished records were cut off)"
            )
        if config.retry_failed:
            _say(
                f"{journal.num_retried} failed lines are sent again"
                + f"; their errors are kept in {paths.before_retry}" * bool(journal.num_retried)
            )
        if dropped is not None:
            asyncio.run(_drop_batches(config, dropped))
        asyncio.run(_run_until_end(config, progress, load_manifest(paths.batches)))
    if progress.is_at_server:
        exit_code = ExitCode.GOING_ON if config.fetch_only else ExitCode.ANSWERED
        return exit_code, (
            f"the server continues; cosched batch status -o {config.out} shows the progress (also "
            "cancel, fetch); the same command without --detach waits"
        )
    if not journal.num_failed:
        return ExitCode.ANSWERED, None
    return ExitCode.SOME_FAILED, (
        f"{journal.num_failed} failed lines are in {paths.errors}"
        f"{_common_cause(progress.counts)}; {_advice(progress.counts, journal.num_failed)}"
    )


def _advice(counts: JobCounts, num_failed: int) -> str:
    """What helps the failed lines. Lines of earlier calls may be of either kind."""
    num_wrong = sum(
        number for code, number in counts.failed_by_code.items() if is_wrong_for_good(code)
    )
    if num_wrong == num_failed:
        return "they are wrong and would fail again: send them corrected, as a new file"
    again = "--retry-failed sends them again"
    return again + f", also the {num_wrong} that are wrong and will fail again" * bool(num_wrong)


def _common_cause(counts: JobCounts) -> str:
    """The error of this call, if all lines failed with the same code."""
    if len(counts.failed_by_code) != 1:
        return ""
    [(code, number)] = counts.failed_by_code.items()
    return f". All {number} of this call: {code}: {counts.last_failure}"


def _again(config: JobConfig) -> str:
    """How to resume: without the options that emptied the outputs."""
    given = {"--overwrite": config.overwrite, "--retry-failed": config.retry_failed}
    dropped = [option for option, is_given in given.items() if is_given]
    return "run the same command again" + f" without {' and '.join(dropped)}" * bool(dropped)


def show_batches(config: JobConfig, *, cancels: bool) -> ExitCode:
    """Print the server's batches of a job, which `cancels` cancels first. JobFileError if there are
    none."""
    manifest = _manifest_of(config)

    async def ask() -> list[RemoteBatch]:
        async with _api(config, manifest.base_url) as api:
            if cancels:
                for name in manifest.open:
                    await api.cancel(name)
            return await batches_of(manifest, api)

    found = asyncio.run(ask())
    print_batches(found, is_fetched=lambda one: one.id in manifest.done)
    have_ended = all(one.status in ENDED for one in found)
    return ExitCode.ANSWERED if have_ended else ExitCode.GOING_ON


def fetch(config: JobConfig) -> ExitCode:
    """Write the results of a job's batches that have ended. JobFileError if it has none."""
    manifest = _manifest_of(config)
    config = replace(
        config,
        input=manifest.input,
        base_url=manifest.base_url,
        window=manifest.window,
        errors=manifest.errors,
        max_line_bytes=manifest.max_line_bytes,
        fetch_only=True,
    )
    return run_job(config)


def _manifest_of(config: JobConfig) -> Manifest:
    path = JournalPaths(out=config.out, errors=None).batches
    manifest = load_manifest(path)
    if manifest is None:
        raise JobFileError(f"no job at {config.out} is at a server (no {path})")
    return manifest


def validate(config: JobConfig) -> ExitCode:
    """Check every line, send nothing and write no file."""
    began_s = time.monotonic()
    source = read_source(config.input)
    counts = asyncio.run(_check_all(source, config.max_line_bytes))
    num_bad = counts.failed_by_code.total()
    exit_code = ExitCode.SOME_FAILED if num_bad else ExitCode.ANSWERED
    results = {
        "counts": {
            "lines": source.num_lines,
            "empty": counts.num_empty,
            "valid": source.num_lines - counts.num_empty - num_bad,
            "bad": num_bad,
        },
        "bad_by_code": dict(counts.failed_by_code),
        "seconds": round(time.monotonic() - began_s, 3),
    }
    print_report(exit_code=exit_code, message=None, config=config.as_json(), results=results)
    return exit_code


async def _check_all(source: Source, max_line_bytes: int) -> JobCounts:
    counts = JobCounts()
    async with aclosing(source.checked_lines(max_line_bytes=max_line_bytes)) as lines:
        async for line in lines:
            if line is None:
                counts.num_empty += 1
            elif isinstance(line, BadLine):
                counts.note(line)
                if counts.failed_by_code.total() <= _MAX_SHOWN_FAULTS:
                    _say(f"{source.path}:{line.number}: {line.code}: {line.message}")
    if counts.failed_by_code.total() > _MAX_SHOWN_FAULTS:
        _say(f"and {counts.failed_by_code.total() - _MAX_SHOWN_FAULTS} more bad lines")
    source.check_unchanged()
    return counts


async def _drop_batches(config: JobConfig, manifest: Manifest) -> None:
    """Cancel the batches of a job that --overwrite replaces, and delete their files. One try."""
    rules = RetryRules(max_wait_s=0.0)
    try:
        async with BatchApi(base_url=manifest.base_url, api_key=config.api_key, rules=rules) as api:
            for one in await batches_of(manifest, api):
                if one.status not in ENDED:
                    await api.cancel(one.id)
                for name in (one.input_file_id, one.output_file_id, one.error_file_id):
                    if name:
                        await api.delete(name)
    except CoschedError as error:
        _say(f"cannot cancel the batches of the earlier job: {error}")


async def _run_until_end(config: JobConfig, progress: _Progress, manifest: Manifest | None) -> None:
    """_StoppedError when a signal ended the job in order."""
    source, journal = progress.source, progress.journal
    assert source is not None and journal is not None
    port = config.port or free_port()
    base_url = config.base_url if config.model_path is None else own_base_url(port)
    client = Client(
        base_url=base_url,
        concurrency=config.concurrency,
        rules=_retry_rules(config),
        rng=random.Random(config.seed),
        timeout_s=config.timeout_s,
        api_key=config.api_key,
    )
    server = _server(config, client, port=port, log_path=journal.paths.server_log)
    _stop_on_signals()
    with Reporter(every_s=config.progress_every_s, num_done=journal.num_done) as reporter:
        try:
            async with client:
                if manifest is None and await _is_for_batches(config, client, server, journal):
                    manifest = Manifest(
                        base_url=base_url,
                        window=_WINDOW,
                        input=str(Path(source.path).absolute()),
                        errors=config.errors,
                        max_line_bytes=config.max_line_bytes,
                    )
                if manifest is not None:
                    manifest.window = config.window or manifest.window
                    await _run_remotely(config, progress, manifest, reporter.show)
                    return
                job = Job(
                    source=source,
                    journal=journal,
                    client=client,
                    server=server,
                    concurrency=config.concurrency,
                    max_line_bytes=config.max_line_bytes,
                    ordered=config.ordered,
                    show=reporter.show,
                )
                progress.counts = job.counts
                await job.run()
        except asyncio.CancelledError:
            raise _StoppedError(
                f"interrupted; no answer is lost. To resume, {_again(config)}"
            ) from None
        finally:
            await asyncio.to_thread(server.stop)


async def _is_for_batches(
    config: JobConfig, client: Client, server: OwnServer | RunningServer, journal: Journal
) -> bool:
    """Whether to send this job as batches. A job that began line by line continues so, and so does
    a job whose server is not there yet. ServerRefusedError if batches are required and the server
    has none."""
    is_required = config.via == "batches" or config.detach
    if config.via == "lines" or config.model_path is not None or config.ordered:
        return False
    if is_required:
        await server.ready()
    elif journal.num_done:
        return False
    async with _api(config, config.base_url) as api:
        has_batches = await client.serves_classes() and await api.has_batches()
    if is_required and not has_batches:
        raise ServerRefusedError(
            f"{config.base_url} has no batches of cosched's: start it with --cosched-batches "
            "FOLDER, or use --via lines"
        )
    return has_batches


async def _run_remotely(
    config: JobConfig,
    progress: _Progress,
    manifest: Manifest,
    show: Callable[[Snapshot], None],
) -> None:
    """_StoppedError when a signal ended the waiting in order."""
    assert progress.source is not None and progress.journal is not None
    async with _api(config, manifest.base_url) as api:
        job = RemoteJob(
            source=progress.source,
            journal=progress.journal,
            api=api,
            manifest=manifest,
            show=show,
            say=_say,
        )
        progress.counts = job.counts
        try:
            if config.fetch_only:
                await job.fetch()
            elif config.detach:
                await job.submit()
            else:
                await job.run()
            progress.is_at_server = job.is_open
        except asyncio.CancelledError:
            raise _StoppedError(
                "interrupted; the server continues with the uploaded lines. The same command waits "
                f"for them, cosched batch cancel -o {config.out} ends them"
            ) from None


def _api(config: JobConfig, base_url: str) -> BatchApi:
    return BatchApi(
        base_url=base_url,
        api_key=config.api_key,
        rules=_retry_rules(config),
        rng=random.Random(config.seed),
    )


def _retry_rules(config: JobConfig) -> RetryRules:
    return RetryRules(max_wait_s=config.max_wait_s, max_retries=config.max_retries)


def _server(
    config: JobConfig, client: Client, *, port: int, log_path: str
) -> OwnServer | RunningServer:
    if config.model_path is None:
        return RunningServer(
            client=client,
            max_wait_s=config.max_wait_s,
            absent_wait_s=config.absent_wait_s,
            require_offline=config.require_offline,
            warn=_say,
        )
    return OwnServer(
        client=client,
        command=server_command(model_path=config.model_path, port=port, flags=config.server_flags),
        log_path=log_path,
        start_timeout_s=config.start_timeout_s,
    )


def _stop_on_signals() -> None:
    """The first SIGINT or SIGTERM cancels the job, which ends in order; the second kills it."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    signals = iter([task.cancel])

    def stop() -> None:
        cancel = next(signals, None)
        if cancel is None:
            # Safe at any moment, like kill -9; the job's own server gets a SIGTERM then.
            os._exit(ExitCode.INTERRUPTED)
        _say("stopping; repeat to stop without waiting")
        cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _allowed_connections(concurrency: int) -> int:
    """Raise the limit on open files; how many connections it allows, which is less than the default
    on some machines. ConfigError where more than the default is asked for, and too much."""
    needed = concurrency + _FILES_BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return concurrency
    if hard != resource.RLIM_INFINITY and hard < needed:
        allowed = max(1, hard - _FILES_BESIDE_CONNECTIONS)
        why = (
            f"--concurrency {concurrency} needs {needed} open files and {hard} are allowed "
            "(ulimit -Hn)"
        )
        if concurrency > LINES_AT_SERVER:
            raise ConfigError(f"{why}: use at most {allowed}")
        _say(f"{allowed} requests at the server at a time: {why}")
        concurrency, needed = allowed, hard
    with contextlib.suppress(ValueError, OSError):  # then connecting reports it
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return concurrency


def _say(text: str) -> None:
    print(f"run_batch: {text}", file=sys.stderr, flush=True)
