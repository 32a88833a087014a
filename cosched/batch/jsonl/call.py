"""One call of run_batch: sets a job up, handles signals, says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from cosched.batch.jsonl.batch_api import ENDED, BatchApi, RemoteBatch
from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.config import JobConfig
from cosched.batch.jsonl.errors import DiskError, JobFileError, ServerGoneError, ServerRefusedError
from cosched.batch.jsonl.journal import Journal, JournalPaths
from cosched.batch.jsonl.lines import BadLine
from cosched.batch.jsonl.progress import Snapshot, make_reporter
from cosched.batch.jsonl.remote import Manifest, RemoteJob, batches_of, load_manifest, new_manifest
from cosched.batch.jsonl.report import job_results, print_batches, print_report
from cosched.batch.jsonl.runner import Job, JobCounts, checked_lines
from cosched.batch.jsonl.server import (
    OwnServer,
    RunningServer,
    free_port,
    own_base_url,
    server_command,
)
from cosched.batch.jsonl.sidecar import JobState
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    exit_code: ExitCode
    message: str | None = None


class _StoppedError(Exception):
    """By a signal, in order."""


@dataclass(slots=True, kw_only=True)
class _Standing:
    """How far a call has come; what it has not come to is None."""

    source: Source | None = None
    journal: Journal | None = None
    counts: JobCounts = field(default_factory=JobCounts)
    is_going_on: bool = False


def run_job(config: JobConfig) -> ExitCode:
    """Run the job to its end, or to what stops it, and report."""
    began_s = time.monotonic()
    standing = _Standing()
    try:
        ending = _run(config, standing)
    except KeyboardInterrupt:
        message = "interrupted; the same command resumes"
        ending = _Ending(exit_code=ExitCode.INTERRUPTED, message=message)
    except _StoppedError as error:
        ending = _Ending(exit_code=ExitCode.INTERRUPTED, message=str(error))
    except DiskError as error:
        message = f"{error}\nTo go on when it can be written, {_again(config)}"
        ending = _Ending(exit_code=ExitCode.BAD_USAGE, message=message)
    except ServerRefusedError as error:
        ending = _Ending(exit_code=ExitCode.SERVER_GONE, message=str(error))
    except ServerGoneError as error:
        message = f"{error}\nTo go on when it is back, {_again(config)}"
        ending = _Ending(exit_code=ExitCode.SERVER_GONE, message=message)
    except CoschedError as error:
        ending = _Ending(exit_code=ExitCode.BAD_USAGE, message=str(error))
    if ending.message:
        _say(ending.message)
    counts, journal = standing.counts, standing.journal
    print_report(
        exit_code=ending.exit_code,
        message=ending.message,
        config=config.as_json(),
        results=job_results(
            counts={
                "lines": standing.source.num_lines if standing.source else 0,
                "empty": counts.num_empty,
                "answered": journal.num_answered if journal else 0,
                "failed": journal.num_failed if journal else 0,
                "answered_now": counts.num_answered,
                "failed_now": counts.num_failed,
            },
            failed_by_code=dict(counts.failed_by_code),
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            seconds=time.monotonic() - began_s,
        ),
    )
    return ending.exit_code


def _run(config: JobConfig, standing: _Standing) -> _Ending:
    _allow_connections(config.concurrency)
    standing.source = source = read_source(config.input)
    paths = JournalPaths(out=config.out, errors=config.errors)
    state = JobState(
        source=source,
        errors_beside_out=paths.errors_beside_out,
        ordered=config.ordered,
        max_line_bytes=config.max_line_bytes,
    )
    with Journal.open(
        paths=paths,
        state=state,
        overwrite=config.overwrite,
        retry_failed=config.retry_failed,
    ) as journal:
        standing.journal = journal
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
        manifest = load_manifest(paths.batches)
        asyncio.run(_until_end(config, source, journal, standing, manifest))
    if standing.is_going_on:
        return _Ending(
            exit_code=ExitCode.GOING_ON if config.fetch_only else ExitCode.ANSWERED,
            message=f"the server goes on with it: cosched batch status -o {config.out} shows how "
            "far it is (also cancel, fetch); the same command without --detach waits",
        )
    if not journal.num_failed:
        return _Ending(exit_code=ExitCode.ANSWERED)
    return _Ending(
        exit_code=ExitCode.SOME_FAILED,
        message=f"{journal.num_failed} failed lines are in {paths.errors}"
        + _common_cause(standing.counts)
        + "; --retry-failed sends them again",
    )


def _common_cause(counts: JobCounts) -> str:
    """What failed in this call, where all of it failed in the same way."""
    if len(counts.failed_by_code) != 1:
        return ""
    [(code, number)] = counts.failed_by_code.items()
    return f". All {number} of this call: {code}: {counts.last_failure}"


def _again(config: JobConfig) -> str:
    """How to go on: with what emptied or reopened the outputs left out."""
    dropped = [
        option
        for option, is_given in (
            ("--overwrite", config.overwrite),
            ("--retry-failed", config.retry_failed),
        )
        if is_given
    ]
    return "run the same command again" + f" without {' and '.join(dropped)}" * bool(dropped)


def show_batches(config: JobConfig, *, cancels: bool) -> ExitCode:
    """What the server says of the batches of a job; with `cancels` they are cancelled first.
    JobFileError when there are none."""
    manifest = _manifest_of(config)

    async def ask() -> list[RemoteBatch]:
        async with _api(config, manifest.base_url) as api:
            if cancels:
                for name in manifest.open:
                    await api.cancel(name)
            return await batches_of(manifest, api)

    found = asyncio.run(ask())
    print_batches(found, is_fetched=lambda one: one.id in manifest.done)
    is_over = all(one.status in ENDED for one in found)
    return ExitCode.ANSWERED if is_over else ExitCode.GOING_ON


def fetch(config: JobConfig) -> ExitCode:
    """Write the results of a job's batches that have ended. JobFileError when there are none."""
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
        raise JobFileError(f"no job at {config.out} that a server has (no {path})")
    return manifest


def validate(config: JobConfig) -> ExitCode:
    """Check every line, send nothing and write no file."""
    began_s = time.monotonic()
    source = read_source(config.input)
    counts = JobCounts()
    by_code = asyncio.run(_check_all(source, config.max_line_bytes, counts))
    num_bad = by_code.total()
    seconds = time.monotonic() - began_s
    exit_code = ExitCode.SOME_FAILED if num_bad else ExitCode.ANSWERED
    num_valid = source.num_lines - counts.num_empty - num_bad
    results = {
        "counts": {
            "lines": source.num_lines,
            "empty": counts.num_empty,
            "valid": num_valid,
            "bad": num_bad,
        },
        "bad_by_code": dict(by_code),
        "seconds": round(seconds, 3),
    }
    print_report(exit_code=exit_code, message=None, config=config.as_json(), results=results)
    return exit_code


async def _check_all(source: Source, max_line_bytes: int, counts: JobCounts) -> Counter[str]:
    by_code: Counter[str] = Counter()
    async for line in checked_lines(source, max_line_bytes=max_line_bytes, counts=counts):
        if isinstance(line, BadLine):
            by_code[line.code] += 1
            if by_code.total() <= _MAX_SHOWN_FAULTS:
                _say(f"{source.path}:{line.number}: {line.code}: {line.message}")
    if by_code.total() > _MAX_SHOWN_FAULTS:
        _say(f"and {by_code.total() - _MAX_SHOWN_FAULTS} more bad lines")
    source.check_unchanged()
    return by_code


async def _until_end(
    config: JobConfig,
    source: Source,
    journal: Journal,
    standing: _Standing,
    manifest: Manifest | None,
) -> None:
    """Raises _StoppedError when a signal stopped the job in order."""
    port = config.port or free_port()
    base_url = config.base_url if config.model_path is None else own_base_url(port)
    client = _client(config, base_url)
    server = _server(config, client, port=port, log_path=journal.paths.server_log)
    _stop_on_signals()
    with make_reporter(every_s=config.progress_every_s, num_done=journal.num_done) as reporter:
        try:
            async with client:
                if manifest is None and await _has_batches(config, client, server, journal):
                    manifest = new_manifest(
                        base_url=base_url,
                        window=config.window or _WINDOW,
                        source=source,
                        errors=config.errors,
                        max_line_bytes=config.max_line_bytes,
                    )
                if manifest is not None:
                    manifest.window = config.window or manifest.window
                    await _remotely(config, source, journal, standing, manifest, reporter.show)
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
                standing.counts = job.counts
                await job.run()
        except asyncio.CancelledError:
            raise _StoppedError(
                f"interrupted; nothing that was answered is lost. To go on, {_again(config)}"
            ) from None
        finally:
            await asyncio.to_thread(server.stop)


async def _has_batches(
    config: JobConfig, client: Client, server: OwnServer | RunningServer, journal: Journal
) -> bool:
    """Whether this job is one for the server's batches. One that has begun line by line goes on so,
    and so does one whose server is not there yet. ServerRefusedError where they are asked for and
    there are none."""
    is_asked_for = config.via == "batches" or config.detach
    if config.via == "lines" or config.model_path is not None or config.ordered:
        return False
    if is_asked_for:
        await server.ready()
    elif journal.num_done:
        return False
    async with _api(config, config.base_url) as api:
        has_them = await client.serves_classes() and await api.is_there()
    if is_asked_for and not has_them:
        raise ServerRefusedError(
            f"{config.base_url} has no batches of cosched's: start it with --cosched-batches "
            "FOLDER, or use --via lines"
        )
    return has_them


async def _remotely(
    config: JobConfig,
    source: Source,
    journal: Journal,
    standing: _Standing,
    manifest: Manifest,
    show: Callable[[Snapshot], None],
) -> None:
    """Raises _StoppedError when a signal stopped the waiting in order."""
    async with _api(config, manifest.base_url) as api:
        job = RemoteJob(
            source=source, journal=journal, api=api, manifest=manifest, show=show, say=_say
        )
        standing.counts = job.counts
        try:
            if config.fetch_only:
                await job.fetch()
                standing.is_going_on = job.is_open
            elif config.detach:
                await job.submit()
                standing.is_going_on = job.is_open
            else:
                await job.run()
        except asyncio.CancelledError:
            raise _StoppedError(
                "interrupted; the server goes on with what it has. The same command waits for it, "
                f"cosched batch cancel -o {config.out} ends it"
            ) from None


def _api(config: JobConfig, base_url: str) -> BatchApi:
    return BatchApi(
        base_url=base_url,
        api_key=config.api_key,
        rules=RetryRules(max_wait_s=config.max_wait_s, max_retries=config.max_retries),
        rng=random.Random(config.seed),
        clock=time.monotonic,
    )


def _client(config: JobConfig, base_url: str) -> Client:
    return Client(
        base_url=base_url,
        concurrency=config.concurrency,
        rules=RetryRules(max_wait_s=config.max_wait_s, max_retries=config.max_retries),
        rng=random.Random(config.seed),
        clock=time.monotonic,
        timeout_s=config.timeout_s,
        api_key=config.api_key,
    )


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
    """The first SIGINT or SIGTERM cancels the job, which then ends in order; the second kills."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    signals = iter([task.cancel])

    def stop() -> None:
        cancel = next(signals, None)
        if cancel is None:
            # Safe at any moment, like kill -9; the job's own server gets a SIGTERM by that.
            os._exit(ExitCode.INTERRUPTED)
        _say("stopping; once more to stop without waiting")
        cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _allow_connections(concurrency: int) -> None:
    """Raise the limit on open files, or say why it cannot be."""
    needed = concurrency + _FILES_BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"--concurrency {concurrency} needs {needed} open files and {hard} are allowed "
            f"(ulimit -Hn): use at most {max(1, hard - _FILES_BESIDE_CONNECTIONS)}"
        )
    with contextlib.suppress(ValueError, OSError):  # then connecting fails with its own message
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _say(text: str) -> None:
    print(f"run_batch: {text}", file=sys.stderr, flush=True)
