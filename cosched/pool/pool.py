"""The pool's interface, and the plain first-in-first-out pool."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedDict

from cosched.core.request import Request
from cosched.core.view import OfflineOrder

R = TypeVar("R", bound=Request)


class PrefixRequest(Request, Protocol):
    """A request whose place in prefix order can be known. Both stay as they are while it waits."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens; an array is read many times faster than a list."""
        ...

    @property
    def prefix_key(self) -> Hashable:
        """Requests of different keys share no KV: SGLang's ``extra_key`` (which names the LoRA
        adapter) and ``cache_salt``."""
        ...


class OfflinePool(Protocol[R]):
    """Waiting offline requests. One request is in it at most once; rids are unique.

    add      a new request, or one that was preempted; asserts that its rid is not in the pool
    remove   takes out a request that is admitted; KeyError when it is not in the pool
    abort    takes out a request that will not run; KeyError when it is not in the pool
    promote  the KV of a request that is not in the pool is, or will soon be, cached
    advance  says what time it is, before planning
    ended    an admitted request has ended with `num_tokens`, its prompt's among them, `seconds`
             after its first token; `rid` is only asked where tenants are told apart
    order    one pass over it, best first; valid until the next `add` or `remove`. O(1)
    """

    def add(self, request: R) -> None: ...

    def remove(self, rid: str) -> R: ...

    def abort(self, rid: str) -> R: ...

    def promote(self, request: PrefixRequest) -> None: ...

    def advance(self, now_s: float) -> None: ...

    def ended(self, num_tokens: int, seconds: float, rid: str = "") -> None: ...

    def get(self, rid: str) -> R | None: ...

    def __contains__(self, rid: object) -> bool: ...

    def __len__(self) -> int: ...

    def order(self) -> OfflineOrder: ...


class ArrivalQueue(Generic[R]):
    """Requests in the order of arrival; one that goes back takes its old place.

    `add` and `remove` are O(log n), `get` is O(1). Implements `OfflinePool`; the online queue is
    one of these too.
    """

    __slots__ = ("_by_rid", "_by_seq")

    def __init__(self) -> None:
        self._by_seq: SortedDict[int, R] = SortedDict()
        self._by_rid: dict[str, R] = {}

    def add(self, request: R) -> None:
        assert request.rid not in self._by_rid, f"already queued: {request.rid=}"
        assert request.arrival_seq not in self._by_seq, f"{request.arrival_seq=}"
        self._by_rid[request.rid] = request
        self._by_seq[request.arrival_seq] = request

    def remove(self, rid: str) -> R:
        request = self._by_rid.pop(rid)
        del self._by_seq[request.arrival_seq]
        return request

    def get(self, rid: str) -> R | None:
        return self._by_rid.get(rid)

    abort = remove

    def promote(self, request: PrefixRequest) -> None:
        """The order of arrival does not depend on the cache."""

    def advance(self, now_s: float) -> None:
        """The order of arrival does not depend on the time."""

    def ended(self, num_tokens: int, seconds: float, rid: str = "") -> None:
        """The order of arrival does not depend on how fast requests are served."""

    def at(self, index: int) -> R:
        """The request at a position in the order of arrival, O(log n). IndexError outside."""
        request: R = self._by_seq.peekitem(index)[1]
        return request

    def __contains__(self, rid: object) -> bool:
        return rid in self._by_rid

    def __len__(self) -> int:
        return len(self._by_rid)

    def order(self) -> ArrivalOrder[R]:
        return ArrivalOrder(iter(self))

    def __iter__(self) -> Iterator[R]:
        # As `values()` would, without a step of Python code for each.
        return map(self._by_seq.__getitem__, self._by_seq)


class ArrivalOrder(Iterator[R]):
    """Implements `cosched.core.view.OfflineOrder` where nothing is known of buckets and prefixes:
    one bucket, and no request is left out."""

    __slots__ = ("_ahead", "_requests")

    knows_prefixes = False

    def __init__(self, requests: Iterator[R]) -> None:
        self._requests = requests
        self._ahead: list[R] = []  # candidates that are not taken

    def __next__(self) -> R:
        return self._ahead.pop(0) if self._ahead else next(self._requests)

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        """Which requests share a prefix is not known."""

    def candidates(self, per_bucket: int) -> list[list[R]]:
        self._ahead += islice(self._requests, max(per_bucket - len(self._ahead), 0))
        return [self._ahead[:per_bucket]]

    def num_shared(self, request: Request) -> int:
        return 0

    def take(self, request: Request) -> None:
        self._ahead = [ahead for ahead in self._ahead if ahead is not request]

    pass_over = take
    urgent_until_s = -math.inf

    def ask_next(self) -> bool:
        return False
