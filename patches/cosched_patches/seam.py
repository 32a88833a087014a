"""A seam: one place in SGLang that cosched hooks, and the check that it is as expected."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cosched.errors import SeamError
from cosched.versions import SGLANG_VERSION

ALLOW_VARIABLE = "COSCHED_ALLOW_SGLANG"
"""Environment variable: another version of SGLang that the operator allows at their own risk."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One hook into SGLang; made by `before`, `after` and `around`.

    kind        ``before``: the hook gets the arguments of the original and runs before it;
                ``after``: it gets its result and arguments, and what it returns, if not None,
                replaces the result; ``around``: it gets the original and its arguments, and calls
                it
    target      dotted path of a function or method of SGLang
    parameters  names of its parameters, in order, which the hook relies on
    hook        the function; its docstring says what it is for
    """

    kind: str
    target: str
    parameters: str
    hook: Callable[..., Any]


before = partial(Seam, "before")
after = partial(Seam, "after")
around = partial(Seam, "around")


def install(seams: Iterable[Seam]) -> None:
    """Check, hook and check again. SeamError names the seam, what was expected and what was found.
    SGLang's `apply_hooks` only logs failures.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = tuple(seams)
    check_signatures(seams)
    for seam in seams:
        HookRegistry.register(seam.target, seam.hook, HookType(seam.kind))
    with _quick_for_methods():
        HookRegistry.apply_hooks()
    check_wrapped(seams)


@contextlib.contextmanager
def _quick_for_methods() -> Iterator[None]:
    """SGLang searches all modules for imports of each function that it hooks, which takes one or
    two seconds in all. Methods are not imported by name, so they need no search."""
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
            found = ", ".join(inspect.signature(target).parameters)
        except (TypeError, ValueError) as error:
            raise _mismatch(seam, f"({seam.parameters})", f"no signature ({error})") from None
        if found != seam.parameters:
            raise _mismatch(seam, f"({seam.parameters})", f"({found})")


def check_wrapped(seams: Iterable[Seam]) -> None:
    """SeamError unless every target is now the hooked one."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for seam in seams:
        if seam.target not in HookRegistry._patched or not hasattr(_resolve(seam), "__wrapped__"):
            raise _mismatch(seam, f"a hook of kind {seam.kind!r} in place", "the stock code")


def check_version() -> None:
    """SeamError unless the installed SGLang is the supported version, or the one that
    `ALLOW_VARIABLE` names. In another version signatures may fit although the code has changed."""
    from sglang.version import __version__

    if __version__ == SGLANG_VERSION:
        return
    if os.environ.get(ALLOW_VARIABLE, "").strip() != __version__:
        raise SeamError(
            f"{running_on()} To try this version, set {ALLOW_VARIABLE}={__version__}: answers and "
            "scheduling are then untested."
        )
    logging.getLogger("cosched").warning(
        "%s %s allows it: ANSWERS AND SCHEDULING ARE UNTESTED with this version.",
        running_on(),
        ALLOW_VARIABLE,
    )


def running_on() -> str:
    from sglang.version import __version__

    return f"This is sglang {__version__}; cosched supports sglang {SGLANG_VERSION}."


def _resolve(seam: Seam) -> Any:
    try:
        return pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError) as error:
        raise _mismatch(seam, f"({seam.parameters})", f"nothing there ({error})") from None


def _mismatch(seam: Seam, expected: str, found: str) -> SeamError:
    return SeamError(
        f"SGLang seam {seam.target}: expected {expected}, found {found}. {running_on()}"
    )
