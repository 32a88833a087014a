"""Features hear of each step of the loop, which knows none of them.

A feature is a class in a file of its own in `cosched.engine.features`; nothing else names it unless
something else reads it (`Features.get`). What it knows of a request it keeps itself, by rid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import LateReason
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

    def on_receive(self) -> None:
        """Requests are about to be received, for the next iteration."""

    def on_arrival(self, request: Any) -> None:
        """A request came, or was seen for the first time."""

    def on_queued(self, request: Any) -> None:
        """It waits: it is new, or it goes back."""

    def on_unqueued(self, request: Any) -> None:
        """It waits no longer: it is admitted, or was aborted."""

    def on_pool_failed(self) -> None:
        """Offline requests wait in the order of arrival from now on."""

    def on_look(self, view: View) -> None:
        """A plan is about to be made from this view."""

    def why_blocked(self, request: Any) -> SkipReason | None:
        """Why a waiting request cannot be admitted by the next plan; None: it can. Asked while a
        plan is made, and not left out where it fails."""
        return None

    def on_plan(self, iteration: Iteration, view: View) -> None:
        """It was made from this view; nothing of it has been applied."""

    def to_share(self) -> Any:
        """What goes to the other ranks with a plan; anything that is encoded as JSON. Not left out
        where it fails, as ranks would differ: nor is `on_shared`."""

    def on_shared(self, given: Any) -> None:
        """On all ranks, before a plan is applied: what `to_share` gave on the rank that planned."""

    def on_late(self, request: Any, reason: LateReason) -> None:
        """The first plan says so that the TTFT target of an online request is out of reach."""

    def on_preempted(self, request: Any, mode: PreemptMode, *, num_computed: int) -> None:
        """A running request has released its memory; num_computed: tokens whose KV it had."""

    def on_admitted(self, request: Any) -> None:
        """A waiting request is in the batch that is being built."""

    def on_refused(self, request: Any) -> None:
        """The engine did not take a request that the plan admits: it waits on."""

    def on_launched(self, iteration: Iteration, batch: Any | None) -> None:
        """Its batch is ready to run; None: there is nothing to run."""

    def on_result(self, iteration: Iteration, batch: Any) -> None:
        """Its tokens are known."""

    def on_tokens(self, requests: Sequence[Any], now_s: float) -> None:
        """These requests have new tokens, or have ended, as far as they had not before."""

    def on_finished(self, request: Any) -> None:
        """A request has its whole reply, or was aborted while it ran."""

    def on_aborted(self, request: Any) -> None:
        """A waiting request will not run."""

    def on_abandoned(self) -> None:
        """The iterations under way were taken back: their results will not come."""

    def on_report(self, *, is_idle: bool) -> None:
        """No plan waits for this: the next iteration runs, or there is nothing to do."""


_HOOKS = (*(name for name in vars(Feature) if name.startswith("on_")), "why_blocked")


class Features:
    """The features of one scheduler."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._features: dict[type[Feature], Feature] = {}
        self._hearing: dict[str, list[tuple[Feature, Callable[..., Any]]]]
        self._hearing = {name: [] for name in _HOOKS}
        self.sharing: list[Feature] = []
        """Those that send something with a plan."""

    def add(self, feature: Feature) -> None:
        """After those that are there already."""
        self._features[type(feature)] = feature
        for name, hearing in self._hearing.items():
            if getattr(type(feature), name) is not getattr(Feature, name):
                hearing.append((feature, getattr(feature, name)))
        if type(feature).on_shared is not Feature.on_shared:
            self.sharing.append(feature)

    def silence(self, feature: Feature) -> None:
        """It hears nothing more."""
        for name, hearing in self._hearing.items():
            self._hearing[name] = [one for one in hearing if one[0] is not feature]

    def get(self, kind: type[F]) -> F | None:
        """None: it is not wanted here."""
        return self._features.get(kind)  # type: ignore[return-value]  # the kind is its key

    def __getitem__(self, kind: type[F]) -> F:
        """KeyError where it is not wanted."""
        return self._features[kind]  # type: ignore[return-value]  # as above

    def to_share(self) -> dict[str, Any]:
        return {feature.place: feature.to_share() for feature in self.sharing}

    def shared(self, given: dict[str, Any]) -> None:
        for feature in self.sharing:
            feature.on_shared(given[feature.place])

    def why_blocked(self, request: Any) -> SkipReason | None:
        for _, why in self._hearing[Feature.why_blocked.__name__]:
            reason: SkipReason | None = why(request)
            if reason is not None:
                return reason
        return None

    def tell(
        self, hook: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """hook: of `Feature`."""
        for feature, hears in self._hearing[hook.__name__]:
            try:
                hears(*args, **kwargs)
            except Exception as error:
                if feature.ends and not self._guard.is_strict:
                    self.silence(feature)
                self._guard.note_or_raise(feature.place, error)
