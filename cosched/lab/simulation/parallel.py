"""Many runs at a time, each in a process of its own.

SGLang keeps process-wide state, and memory that a run of many long prompts took is given back. The
processes are forked from one in which SGLang is imported and hooked already
(`cosched_patches.prepared`): that takes longer than a minute of virtual time does.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import cosched.bootstrap
from cosched.lab.simulation.run import RunResult, RunSpec, execute
from cosched.lab.simulation.store import ResultStore

R = TypeVar("R")

_PRELOADED = ["cosched_patches.prepared", "cosched.lab.simulation.virtual"]


def call_all(
    function: Callable[..., R], arguments: Sequence[tuple[Any, ...]], *, num_jobs: int
) -> Iterator[tuple[int, R]]:
    """Call a function with each of these arguments, at most `num_jobs` at a time, each in a fresh
    process; yields (index, result) as they end. An error in a call is raised here."""
    if not arguments:
        return
    context = multiprocessing.get_context("forkserver")
    if not cosched.bootstrap.has_cuda():  # of which a fork can make no use once it was used
        context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(function, *some): index for index, some in enumerate(arguments)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def execute_all(
    specs: Sequence[RunSpec], *, num_jobs: int, store: ResultStore | None = None
) -> Iterator[tuple[int, RunResult]]:
    """Run them, at most `num_jobs` at a time; yields (index, result) as they end. What `store` has
    is not run again, and what is run is put there. An error in a run is raised here.
    """
    left = dict(enumerate(specs))
    if store is not None:
        for index, spec in enumerate(specs):
            result = store.get(spec)
            if result is not None:
                del left[index]
                yield index, result
    indices = list(left)
    calls = call_all(execute, [(spec,) for spec in left.values()], num_jobs=num_jobs)
    for number, result in calls:
        if store is not None:
            store.put(result)
        yield indices[number], result
