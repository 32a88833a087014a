"""The threads that compile grammars: in which order, for how long, with what share of the CPUs.

SGLang starts a compilation for every new grammar at once, on as many threads as it likes, and its
limit counts from the arrival of the request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

from cosched.core.request import RequestClass
from cosched.wire import NAME_KEY, class_of_priority, server_params

GRAMMAR_LIMIT_S = 20.0
"""For which a grammar may be compiled, from the start of its compilation."""
_POLL_S = 1e-4
_NEVER = 1 << 62  # polls
_MOST_GRAMMARS = 256
_CACHE_BYTES = 256 << 20  # of what xgrammar keeps of compiled grammars
_MOST_THREADS = 8  # of one compilation, as xgrammar has it
_MOST_SHOWN = 500  # characters of a log line or a message
_LOGGERS = (
    "sglang.srt.constrained.base_grammar_backend",
    "sglang.srt.constrained.grammar_manager",
    "sglang.srt.constrained.llguidance_backend",
    "sglang.srt.constrained.outlines_backend",
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
)
"""Loggers of the modules that log whole grammars."""


@dataclass(frozen=True, slots=True)
class CompilerShare:
    """What compilations may use of the CPUs. Two cores are left to the scheduler and the HTTP
    process where there are more.

    num_compilers  compilations at the same time
    num_offline    of these, of offline requests
    num_threads    of each compilation
    """

    num_compilers: int
    num_offline: int
    num_threads: int

    @classmethod
    def of(cls, num_cores: int) -> CompilerShare:
        """Of one of the schedulers that share a machine. Half of it is for online requests."""
        num_free = max(1, num_cores - 2)
        num_threads = max(1, min(_MOST_THREADS, num_free // 2))
        num_offline = max(1, num_free // (2 * num_threads))
        return cls(2 * num_offline, num_offline, num_threads)


class GrammarFuture(Future[Any]):
    """The grammar of one request, before it is compiled."""

    def __init__(self, compile: Callable[[], Any], owner: tuple[RequestClass, str]) -> None:
        super().__init__()
        self.compile = compile
        self.owner = owner
        self.began_s: float | None = None


class GrammarCompilers:
    """Stands for the executor of a grammar backend.

    Online requests come before offline ones, which never have all compilers. Within a class the
    owners of API keys take turns. A compilation that has reached its limit cannot be ended, but its
    compiler is replaced, as long as there are not more of these than compilers.
    """

    def __init__(
        self, share: CompilerShare, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.share = share
        self.owner = (RequestClass.ONLINE, "")
        """Class and owner of the request whose grammar is submitted."""
        self._clock = clock
        self._is_ready = threading.Condition()
        self._waiting: dict[RequestClass, OrderedDict[str, deque[GrammarFuture]]] = {
            request_class: OrderedDict() for request_class in RequestClass
        }
        self._running: set[GrammarFuture] = set()
        self._given_up: set[GrammarFuture] = set()
        self._num_threads = 0
        self._num_idle = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> GrammarFuture:
        """Compile for the request of `owner`. Never blocks."""
        future = GrammarFuture(lambda: function(*args), self.owner)
        with self._is_ready:
            request_class, name = self.owner
            self._waiting[request_class].setdefault(name, deque()).append(future)
            self._start()
            self._is_ready.notify()
        return future

    def is_over(self, future: Future[Any]) -> bool:
        """Whether a compilation has reached its limit; then its compiler is replaced."""
        began_s = getattr(future, "began_s", None)
        if began_s is None or future.done() or self._clock() - began_s <= GRAMMAR_LIMIT_S:
            return False
        with self._is_ready:
            if future in self._running and len(self._given_up) < self.share.num_compilers:
                self._running.discard(future)
                self._given_up.add(future)
                self._start()
                self._is_ready.notify()
        return True

    def _start(self) -> None:
        """Threads are started when they are first needed."""
        most = self.share.num_compilers + len(self._given_up)
        if self._num_idle == 0 and self._num_threads < most:
            self._num_threads += 1
            threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._is_ready:
                self._num_idle += 1
                while (future := self._next()) is None:
                    self._is_ready.wait()
                self._num_idle -= 1
            try:
                result = future.compile()
                if isinstance(result, InvalidGrammarObject):
                    result.error_message = shortened(str(result.error_message))
                future.set_result(result)
            except BaseException as error:
                future.set_exception(ValueError(shortened(str(error))))
            with self._is_ready:
                self._running.discard(future)
                if future in self._given_up:  # another thread has its place
                    self._given_up.discard(future)
                    self._num_threads -= 1
                    return
                self._is_ready.notify()

    def _next(self) -> GrammarFuture | None:
        """The grammar that is compiled next. None: none may be."""
        if len(self._running) >= self.share.num_compilers:
            return None
        num_offline = sum(one.owner[0] is RequestClass.OFFLINE for one in self._running)
        for request_class in (RequestClass.ONLINE, RequestClass.OFFLINE):
            if request_class is RequestClass.OFFLINE and num_offline >= self.share.num_offline:
                continue
            owners = self._waiting[request_class]
            while owners:
                name, futures = owners.popitem(last=False)
                future = futures.popleft()
                if futures:
                    owners[name] = futures
                if future.set_running_or_notify_cancel():
                    future.began_s = self._clock()
                    self._running.add(future)
                    return future
        return None


def take_compilers(scheduler: Any, *, num_schedulers: int) -> None:
    """Give the grammar backend of a scheduler these compilers. `num_schedulers`: on the machine."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_shorten)
    backend = scheduler.grammar_manager.grammar_backend
    if backend is None:
        return
    share = CompilerShare.of(len(os.sched_getaffinity(0)) // max(1, num_schedulers))
    backend.executor = GrammarCompilers(share)
    inner = getattr(backend, "grammar_backend", backend)  # of that for models that reason
    if isinstance(inner, XGrammarGrammarBackend):
        inner.grammar_compiler = type(inner.grammar_compiler)(
            inner._tokenizer_info, max_threads=share.num_threads, cache_limit_bytes=_CACHE_BYTES
        )


def compile_for(manager: Any, req: Any) -> None:
    """The next grammar that is submitted is that of this request."""
    compilers = getattr(manager.grammar_backend, "executor", None)
    if isinstance(compilers, GrammarCompilers):
        told = server_params(req.sampling_params.custom_params)
        compilers.owner = (class_of_priority(req.priority), str(told.get(NAME_KEY, "")))


def ready_requests(original: Callable[[], Iterable[Any]], manager: Any) -> list[Any]:
    """The requests whose grammar is compiled or has failed. `original` is SGLang's function.

    SGLang waits up to 5 ms for grammars in each of up to 10,000 iterations, and keeps every grammar
    and every failure. Here iterations do not wait, the cache drops its oldest grammar when it is
    full, and does not keep that a compilation has reached its limit.
    """
    compilers = getattr(manager.grammar_backend, "executor", None)
    if not isinstance(compilers, GrammarCompilers):
        return list(original())
    manager.SGLANG_GRAMMAR_POLL_INTERVAL = _POLL_S
    manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = _NEVER
    before = [(req, req.grammar, req.grammar_key) for req in manager.grammar_queue]
    for req, future, _ in before:
        if isinstance(future, Future) and compilers.is_over(future):
            req.grammar_wait_ct = _NEVER
    ready = list(original())
    cache = manager.grammar_backend.cache
    for req, future, key in before:
        if not isinstance(future, Future) or future.done() or not req.to_finish:
            continue
        if isinstance(cache.get(key), InvalidGrammarObject):
            del cache[key]
        req.to_finish.message = (
            f"the {key[0]} grammar of this request was not compiled within {GRAMMAR_LIMIT_S:g} s "
            "(timed out); send a simpler one"
        )
    # Not `reset`, which waits for the grammars that are being compiled.
    while len(cache) > _MOST_GRAMMARS:
        del cache[next(iter(cache))]
    return ready


def shortened(text: str) -> str:
    """The beginning of a text, and how long it is."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _shorten(record: logging.LogRecord) -> bool:
    record.msg, record.args = shortened(record.getMessage()), ()
    return True
