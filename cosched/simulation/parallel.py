"""Many runs at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from cosched.simulation.run import RunResult, RunSpec, execute
from cosched.simulation.store import ResultStore

__all__ = ["execute_all"]


def execute_all(
    specs: Sequence[RunSpec], *, num_jobs: int, store: ResultStore | None = None
) -> Iterator[tuple[int, RunResult]]:
    """Run them, at most `num_jobs` at a time; yields (index, result) as they end. What `store` has
    is not run again, and what is run is put there.

    Each run gets a fresh process: SGLang keeps process-wide state, and memory that a run of many
    long prompts took is given back. An error in a run is raised here.
    """
    left = dict(enumerate(specs))
    if store is not None:
        for index, spec in enumerate(specs):
            result = store.get(spec)
            if result is not None:
                del left[index]
                yield index, result
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(execute, spec): index for index, spec in left.items()}
        try:
            for future in as_completed(futures):
                result = future.result()
                if store is not None:
                    store.put(result)
                yield futures[future], result
        finally:
            for future in futures:
                future.cancel()
