"""Features hear of each step of the loop, which knows none of them.

A feature is a class in a file of its own in `cosched.engine.features`; nothing else names it unless
something else reads it (`Features.get`). What it knows of a request it keeps itself, by rid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from cosched.core.view import View
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration

P = ParamSpec("P")
F = TypeVar("F", bound="Feature")


class Feature:
    """Hooks, in the order in which they are called; those that a class does not define cost
    nothing. Requests are `cosched.engine.tracked.TrackedRequest`, batches SGLang's.

    place  under which its failures are counted (`Guard`): a hook that fails is left out
    ends   it hears nothing more after a failure
    """

    place: ClassVar[str]
    ends: ClassVar[bool] = False

    @classmethod
    def of(cls, controller: Any) -> Self | None:
        """That of a `cosched.engine.controller.Controller`; None: it is not wanted there."""
        raise NotImplementedError

    def on_arrival(self, request: Any) -> None:
        """A request came, or was seen for the first time."""

    def on_look(self, now_s: float) -> None:
        """A plan is about to be made."""

    def on_plan(self, iteration: Iteration, view: View) -> None:
        """It was made from this view; nothing of it has been applied."""

    def to_share(self) -> Any:
        """What goes to the other ranks with a plan; anything that is encoded as JSON. Not left out
        where it fails, as ranks would differ: nor is `on_shared`."""

    def on_shared(self, given: Any) -> None:
        """On all ranks, before a plan is applied: what `to_share` gave on the rank that planned."""

    def on_launched(self, iteration: Iteration, batch: Any | None) -> None:
        """Its batch is ready to run; None: there is nothing to run."""

    def on_result(self, iteration: Iteration, batch: Any) -> None:
        """Its tokens are known."""

    def on_finished(self, request: Any) -> None:
        """A request has its whole reply, or was aborted while it ran."""

    def on_aborted(self, request: Any) -> None:
        """A waiting request will not run."""

    def on_abandoned(self) -> None:
        """The iterations under way were taken back: their results will not come."""

    def on_report(self, *, is_idle: bool) -> None:
        """No plan waits for this: the next iteration runs, or there is nothing to do."""


_HOOKS = tuple(name for name in vars(Feature) if name.startswith("on_"))


class Features:
    """The features of one scheduler."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._features: dict[type[Feature], Feature] = {}
        self._hearing: dict[str, list[Feature]] = {name: [] for name in _HOOKS}
        self.sharing = self._hearing[Feature.on_shared.__name__]
        """Those that send something with a plan."""

    def add(self, feature: Feature) -> None:
        """After those that are there already."""
        self._features[type(feature)] = feature
        for name, hearing in self._hearing.items():
            if getattr(type(feature), name) is not getattr(Feature, name):
                hearing.append(feature)

    def get(self, kind: type[F]) -> F | None:
        """None: it is not wanted here."""
        return self._features.get(kind)  # type: ignore[return-value]  # the kind is its key

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features.values())

    def to_share(self) -> dict[str, Any]:
        return {feature.place: feature.to_share() for feature in self.sharing}

    def shared(self, given: dict[str, Any]) -> None:
        for feature in self.sharing:
            feature.on_shared(given[feature.place])

    def tell(
        self, hook: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """hook: of `Feature`."""
        name = hook.__name__
        for feature in tuple(self._hearing[name]):
            try:
                getattr(feature, name)(*args, **kwargs)
            except Exception as error:
                if feature.ends and not self._guard.is_strict:
                    for hearing in self._hearing.values():
                        if feature in hearing:
                            hearing.remove(feature)
                self._guard.note_or_raise(feature.place, error)
