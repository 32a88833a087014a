"""A seam: one place in SGLang, how it is hooked, and the check that it is what we expect."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cosched.errors import SeamError
from cosched_patches.version import running_on

__all__ = ["Seam", "check_signatures", "check_wrapped", "install"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One hook.

    target     dotted path of a function, method or class of SGLang
    kind       ``before``, ``after``, ``around`` or ``replace`` (SGLang's `HookType` values)
    signature  parameter names the hook relies on, in order (of ``__init__`` for a class)
    hook       gives the hook callable or class; called when the seam is installed, so that
               importing the seam's module imports nothing of SGLang
    why        one or two sentences
    upstream   issue or pull request of SGLang about the same lack, if there is one
    """

    target: str
    kind: str
    signature: tuple[str, ...]
    hook: Callable[[], Any]
    why: str
    upstream: str = ""


def install(seams: Iterable[Seam]) -> None:
    """Check, hook and check again. SeamError names the seam, what was expected and what was found.

    SGLang's own `apply_hooks` logs failures and goes on; a server that serves without half of its
    scheduler is worse than one that does not start.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = tuple(seams)
    check_signatures(seams)
    for seam in seams:
        HookRegistry.register(seam.target, seam.hook(), HookType(seam.kind))
    with _quick_for_methods():
        HookRegistry.apply_hooks()
    check_wrapped(seams)


@contextlib.contextmanager
def _quick_for_methods() -> Iterator[None]:
    """SGLang looks through all modules for what has imported the function it hooks by its name, a
    second or two for all seams. Nobody imports a method so."""
    from sglang.srt.plugins import hook_registry

    propagate = getattr(hook_registry, "_propagate_patch", None)
    if propagate is None:
        yield
        return

    def of_modules(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else propagate(original, wrapped, owner)

    hook_registry._propagate_patch = of_modules
    try:
        yield
    finally:
        hook_registry._propagate_patch = propagate


def check_signatures(seams: Iterable[Seam]) -> None:
    """SeamError unless every target exists with the parameters its hook was written for."""
    for seam in seams:
        target = _resolve(seam)
        try:
            found = tuple(inspect.signature(target).parameters)
        except (TypeError, ValueError) as error:
            raise _mismatch(seam, _shown(seam.signature), f"no signature ({error})") from None
        if found != seam.signature:
            raise _mismatch(seam, _shown(seam.signature), _shown(found))


def check_wrapped(seams: Iterable[Seam]) -> None:
    """SeamError unless every target is now the hooked one."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for seam in seams:
        target = _resolve(seam)
        hooked = isinstance(target, type) or hasattr(target, "__wrapped__")
        if seam.target not in HookRegistry._patched or not hooked:
            raise _mismatch(seam, f"a hook of kind {seam.kind!r} in place", "the stock code")
        if isinstance(target, type) and target is not seam.hook():
            raise _mismatch(seam, f"class {seam.hook().__name__}", f"class {target.__name__}")


def _resolve(seam: Seam) -> Any:
    try:
        return pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError) as error:
        raise _mismatch(seam, _shown(seam.signature), f"nothing there ({error})") from None


def _shown(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"


def _mismatch(seam: Seam, expected: str, found: str) -> SeamError:
    return SeamError(
        f"SGLang seam {seam.target}: expected {expected}, found {found}. {running_on()}"
    )
