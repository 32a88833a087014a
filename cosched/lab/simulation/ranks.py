"""Ranks of DP attention in virtual time (``--dp-ranks``): a run is forked into a process for each.

A rank has SGLang's scheduler, a KV pool and requests of its own. What SGLang and cosched exchange
between ranks (`cosched.engine.rank_agreement`) they exchange as on a real server. An iteration
starts when the last rank launches it, and lasts as long as that of the slowest rank.

All ranks run the same clients, and each takes its turn of their requests: round robin, as by
SGLang's default (``--load-balance-method``). Before the clients are asked, the ranks exchange which
requests have ended. So all of them know the same, and end together; rank 0 returns the result.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from cosched.batch.jsonl.server import free_port
from cosched.errors import CoschedError
from cosched.lab.metrics.records import IterationLog, RequestRecord

if TYPE_CHECKING:
    from cosched.lab.local_engine import LocalEngine

_GRACE_S = 0.5
_MOST_TOLD = 4000

_THREADS = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang wants to know the core of each rank; nothing is computed there."""


class Ranks:
    """The ranks of a run, as one of them sees it.

    number  of ranks; with 1 nothing is exchanged
    """

    def __init__(self, number: int = 1, rank: int = 0, nccl_port: int = 0) -> None:
        self.number = number
        self.rank = rank
        self._nccl_port = nccl_port
        self._turns = itertools.cycle(range(number))
        self._local: LocalEngine | None = None

    def flags(self) -> Sequence[str]:
        """SGLang's, beside the machine's."""
        return () if self.number == 1 else ("--nccl-port", str(self._nccl_port))

    def join(self, local: LocalEngine) -> None:
        """This rank's engine was built."""
        self._local = local

    def takes_next(self) -> bool:
        """Whether the next request of the clients is for this rank."""
        return next(self._turns) == self.rank

    def step(self, start_s: float, seconds: float) -> tuple[float, float]:
        """When an iteration of all ranks starts, and how long it takes [s]."""
        if self.number == 1:
            return start_s, seconds
        starts, lasting = zip(*self._exchange([start_s, seconds]), strict=True)
        return max(starts), max(lasting)

    def agree(
        self, now_s: float, ended: list[RequestRecord], num_open: int
    ) -> tuple[float, list[RequestRecord], int]:
        """The time, the requests that have ended since the last call, and the number of those that
        have not, of all ranks."""
        if self.number == 1:
            return now_s, ended, num_open
        times, counts, nums_open = zip(*self._exchange([now_s, len(ended), num_open]), strict=True)
        return max(times), self.gather(ended) if any(counts) else [], int(sum(nums_open))

    def gather(self, own: list[Any]) -> list[Any]:
        """The items of all ranks."""
        if self.number == 1:
            return own
        assert self._local is not None
        return list(itertools.chain.from_iterable(self._local.gather(own)))

    def merged(self, own: IterationLog) -> IterationLog:
        """The log of all ranks: of times the longest, of tokens and requests the sum."""
        if self.number == 1:
            return own
        logs = self.gather([own])
        merged = IterationLog()
        by_name = ((name, np.array([log.column(name) for log in logs])) for name in own.names)
        merged.extend(
            np.fmax.reduce(values) if name.endswith("_s") else values.sum(axis=0)
            for name, values in by_name
        )
        return merged

    def end(self) -> None:
        """All has been gathered: only rank 0 returns."""
        if self.rank:
            os._exit(0)

    def _exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        from cosched.engine import port

        assert self._local is not None
        return port.exchange(self._local.scheduler, numbers)


ALONE = Ranks()


@contextlib.contextmanager
def forked(number: int) -> Iterator[Ranks]:
    """This process becomes rank 0, and forks the others. CoschedError where one of those fails."""
    if number == 1:
        yield ALONE
        return
    import torch

    nccl_port, rank = free_port(), 0
    listens, tells = os.pipe()
    others: list[int] = []
    while rank == 0 and len(others) < number - 1:
        others.append(os.fork())
        rank = 0 if others[-1] else len(others)
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[place % len(cores)]) for place in range(number))
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        with mock.patch.dict(os.environ, {_THREADS: binding}):
            yield Ranks(number, rank, nccl_port)
    except BaseException as error:
        if rank:
            if not isinstance(error, CoschedError):
                traceback.print_exc()
            os.write(tells, f"rank {rank}: {error}"[:_MOST_TOLD].encode())
            os._exit(1)
        time.sleep(_GRACE_S)  # of ranks that fail for the same reason
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        os.close(tells)
        message = os.read(listens, _MOST_TOLD * number).decode()
        if message and not isinstance(error, CoschedError):
            raise CoschedError(message) from error
        raise
    finally:
        for pid in others:
            os.waitpid(pid, 0)
        os.close(listens)
