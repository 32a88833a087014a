"""Runs side by side, each in a process of its own.

SGLang keeps state per process, and a fresh process returns the memory of long prompts. Processes
are forked from one that has imported and hooked SGLang (`cosched.lab.simulation.prepared`), which
takes longer than simulating a minute.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from cosched.errors import CoschedError
from cosched.lab.simulation.fleet import execute_replicas
from cosched.lab.simulation.result_store import ResultStore
from cosched.lab.simulation.run import RunResult
from cosched.lab.simulation.run_spec import RunSpec

_PRELOADED = ["cosched.lab.simulation.prepared", "cosched.lab.simulation.virtual"]


def execute_all(
    specs: Sequence[RunSpec], *, num_jobs: int, store: ResultStore | None = None
) -> Iterator[tuple[int, RunResult]]:
    """Execute all, at most `num_jobs` at a time; yields (index, result) as they end. Results that
    `store` has are not computed again, and new ones are put there; equal ones run once. Raises the
    error of a run."""
    left: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        result = None if store is None else store.get(spec)
        if result is None:
            left.setdefault(repr(spec), []).append(index)
        else:
            yield index, result
    equal = list(left.values())
    for number, result in in_processes([specs[index] for index, *_ in equal], num_jobs=num_jobs):
        if store is not None:
            store.put(result)
        for index in equal[number]:
            yield index, result


def in_processes(specs: Sequence[RunSpec], *, num_jobs: int) -> Iterator[tuple[int, RunResult]]:
    """Execute each in a fresh process; yields (index, result) as they end."""
    # Not a ProcessPoolExecutor: with max_tasks_per_child it can hang on Python 3.11.
    waiting = list(enumerate(specs))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                index, spec = waiting.pop()
                connection, process = _start(spec)
                running[connection] = index, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection), f"{ready=}"
                index, process = running.pop(ready)
                yield index, _received(ready, process)
    finally:
        for _, process in running.values():
            process.terminate()


def _start(spec: RunSpec) -> tuple[Connection, Any]:
    import cosched.bootstrap

    context = multiprocessing.get_context("forkserver")
    if not cosched.bootstrap.has_cuda():  # CUDA cannot be used in a fork once it was initialized
        context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, spec), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, spec: RunSpec) -> None:
    try:
        connection.send(execute_replicas(spec))
    except Exception as error:
        connection.send(error)


def _received(connection: Connection, process: Any) -> RunResult:
    try:
        result = connection.recv()
    except EOFError:
        process.join()
        raise CoschedError(f"the process of a run ended with code {process.exitcode}") from None
    process.join()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, RunResult), f"{type(result)=}"
    return result
