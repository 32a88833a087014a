"""Offline requests from SGLang's frontend language.

An endpoint whose requests are all offline::

    backend = cosched.frontend.OfflineEndpoint("http://localhost:30000")
    states = program.run_batch(arguments, backend=backend)

or a block in which an endpoint you have is such a one::

    with cosched.frontend.offline():  # the default backend; or offline(backend)
        states = program.run_batch(arguments)

The programs of a ``run_batch`` start in the order of their arguments' prefixes, up to
`PROGRAMS_AT_ONCE` at a time, so that the server can use what their prompts have in common; results
are in the order of the arguments. Where there is no GPU, import this module before ``sglang``.
"""

from __future__ import annotations

import cosched.bootstrap  # noqa: F401  # isort: skip  # first: makes ``sglang`` importable

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, Self

from sglang.lang import interpreter
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.global_config import global_config

from cosched.batch.jsonl.prefix_order import in_prefix_order, text_key
from cosched.errors import ConfigError
from cosched.wire import OFFLINE_PRIORITY

__all__ = ["OfflineEndpoint", "offline"]

PROGRAMS_AT_ONCE = 512
"""Each has two threads; SGLang's own default, 16 a core, is too few for a server to choose among.
``num_threads=`` of a ``run_batch`` replaces it."""


class OfflineEndpoint(RuntimeEndpoint):  # type: ignore[misc]
    """As `sgl.RuntimeEndpoint`, but every request is offline."""

    @classmethod
    def like(cls, endpoint: RuntimeEndpoint) -> Self:
        """The offline twin of `endpoint`: same server, key and chat template. Asks the server
        nothing."""
        twin = cls.__new__(cls)
        twin.__dict__.update(endpoint.__dict__)
        return twin

    def _add_images(self, s: Any, data: dict[str, Any]) -> None:
        # The last step of building the body of each request, whatever it is for.
        super()._add_images(s, data)
        data["priority"] = OFFLINE_PRIORITY

    def cache_prefix(self, prefix_str: str) -> None:
        # The one request that RuntimeEndpoint builds without that step.
        no_images = SimpleNamespace(images_=[])
        data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._generate_http_request(no_images, data)


class _Switched(OfflineEndpoint):
    """Stands in for an endpoint while at least one `offline` block is open on it."""

    num_blocks: int
    replaced: dict[str, Any]


_blocks_lock = threading.Lock()


@contextmanager
def offline(backend: Any = None) -> Iterator[OfflineEndpoint]:
    """Programs that start in the block, on `backend` or else the default backend, are offline.

    A program's class is fixed when it starts (``run``, ``run_batch``) and holds for all of its
    requests and forks, even those sent after the block. A program that already runs when the block
    begins stays what it is.

    The switch is on the backend object, not on the thread: ``run_batch`` starts programs in threads
    of its own, which see no context of the caller's. So programs that other threads start on the
    same object during the block are offline too; give those an endpoint of their own. Blocks may
    nest and overlap.

    Gives the offline twin of the endpoint, to be passed as ``backend`` explicitly if you like.
    ConfigError when there is no SGLang endpoint to switch.
    """
    if backend is None:
        backend = global_config.default_backend
    # As SGLang does it: a `sgl.Runtime` is not an endpoint, but has one.
    if not isinstance(getattr(backend, "endpoint", backend), RuntimeEndpoint):
        found = "no default backend" if backend is None else f"a {type(backend).__name__}"
        raise ConfigError(
            f"cosched.frontend.offline: needs a RuntimeEndpoint or a Runtime, found {found}; "
            "pass one, or set one with sgl.set_default_backend"
        )
    twin = _open(backend)
    try:
        yield twin
    finally:
        _close(backend, twin)


def _open(backend: Any) -> _Switched:
    with _blocks_lock:
        current = getattr(backend, "endpoint", backend)
        if isinstance(current, _Switched) and current is not backend:
            current.num_blocks += 1
            return current
        twin: _Switched = _Switched.like(current)
        twin.num_blocks = 1
        # SGLang resolves ``backend.endpoint`` once, in the thread that starts a program or a batch
        # of them; only ``program.cache()`` does not.
        switched = {"endpoint": twin, "cache_prefix": twin.cache_prefix}
        twin.replaced = {name: vars(backend)[name] for name in switched if name in vars(backend)}
        vars(backend).update(switched)
        return twin


def _close(backend: Any, twin: _Switched) -> None:
    with _blocks_lock:
        twin.num_blocks -= 1
        if twin.num_blocks == 0:
            del backend.endpoint, backend.cache_prefix
            vars(backend).update(twin.replaced)


def prefix_order(arguments: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of programs' arguments in the order in which they are run. Arguments with few
    different values are taken for the beginnings of prompts, wherever a program uses them."""
    names = dict.fromkeys(name for one in arguments for name in one)
    text = {name: [str(one.get(name, "")).encode() for one in arguments] for name in names}
    most_shared = sorted(names, key=lambda name: len(set(text[name])))
    keys = [
        b"".join(text_key(text[name][place]) for name in most_shared)
        for place in range(len(arguments))
    ]
    return list(in_prefix_order(range(len(keys)), keys.__getitem__, together=len(keys)))


def _in_prefix_order(run_program_batch: Any) -> Any:
    """As SGLang's function, but programs of an offline endpoint run in `prefix_order`."""

    @wraps(run_program_batch)
    def run(
        program: Any,
        backend: Any,
        batch_arguments: Sequence[Mapping[str, Any]],
        default_sampling_para: Any,
        num_threads: int | str,
        progress_bar: bool,
        generator_style: bool = False,
    ) -> Any:
        given = (default_sampling_para, num_threads, progress_bar, generator_style)
        if not isinstance(getattr(backend, "endpoint", backend), OfflineEndpoint):
            return run_program_batch(program, backend, batch_arguments, *given)
        if num_threads == "auto":
            given = (default_sampling_para, PROGRAMS_AT_ONCE, progress_bar, generator_style)
        order = prefix_order(batch_arguments)
        arguments = [batch_arguments[place] for place in order]
        states = run_program_batch(program, backend, arguments, *given)
        found = _as_given(zip(order, states, strict=True))
        return found if generator_style else list(found)

    return run


def _as_given(states: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """Each state as soon as all earlier ones have come."""
    held: dict[int, Any] = {}
    following = 0
    for place, state in states:
        held[place] = state
        while following in held:
            yield held.pop(following)
            following += 1


# SGLang looks the function up each time that a program is run on a batch.
interpreter.run_program_batch = _in_prefix_order(interpreter.run_program_batch)
