"""Learning how long iterations take while the server runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.estimates import Predictor
from cosched.errors import ConfigError
from cosched.latency.features import TotalsTable
from cosched.latency.fit_cosched import fit_phases
from cosched.latency.graphs import GraphSizes
from cosched.latency.steps import Steps, finish

__all__ = ["Calibrator", "ColdStart"]

DRIFT_WINDOW = 9
"""Iterations whose median tells how much slower the machine is now: up to four disturbed ones leave
it where it is, the fifth slow one moves it."""

JUMP = 0.15
"""A median that differs by more is followed, until its window has passed. Less may be noise, and is
left to scale and shape: a drift that followed every median would wander, since what is kept for
comparison has it taken out."""

MARGIN_WINDOW = 16

MOST_MARGIN = 2.0
"""Two disturbed iterations that come close together do not stop everything."""

CHANGE = 0.25
CHANGE_MARGIN = 1.15
"""Two iterations longer than believed by more than `CHANGE` are taken for a change of the machine
until scale or drift have followed; its size is not known well from two, hence this much more."""

SCALE_WINDOW = 33
COLD_WINDOW = 9

CELL_SIZE = 12
"""Observations of a kind (`_cell`) kept for fitting, the latest ones."""

LEAST_ALIKE = 4
"""Earlier observations of a kind from which one can tell that a new one took longer."""

LEAST_OBSERVATIONS = 32
"""Observations of a phase before its first fit, and between two."""

FIT_WORK = 40_000
STEP_WORK = 3_000
"""A fit goes on by so much work with each observation (`Steps`; a step is at least so much): a
tenth of a millisecond or two, and some thirty observations for the fit."""

REFIT_GROWTH = 0.5
REFIT_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart(Predictor):
    """What is believed of a machine nobody has measured: some eight times what an A100 takes for an
    8B model, and its 12 ms that an iteration takes at least, rounded up.

    fixed_s        of an iteration [s]
    token_s        of each token through the layers [s]
    context_s      of each token that a decode attends to [s]
    double_pair_s  of half a (query, key) pair of prefill attention [s]
    """

    fixed_s: float = 15e-3
    token_s: float = 0.5e-3
    context_s: float = 1e-6
    double_pair_s: float = 1e-8

    @property
    def name(self) -> str:
        return "cold-start"

    def predict_s(self, totals: BatchTotals) -> float:
        tokens = totals.num_new + totals.num_decodes
        if not tokens:
            return 0.0
        return (
            self.fixed_s
            + self.token_s * tokens
            + self.context_s * totals.decode_context
            + self.double_pair_s * totals.double_pairs
        )

    def describe(self) -> dict[str, object]:
        return {"predictor": self.name, **asdict(self)}


class Calibrator(Predictor):
    """A predictor that learns from the iterations it is shown.

        estimate = shape * scale of the phase * drift * growth
        prediction = estimate * (1 + margin) * error

    There are two phases: iterations with a prefill, and decode-only ones.

    shape   Of a phase: the predictor it was given, or one fitted to its own observations
            (`fit_phases`): first after `LEAST_OBSERVATIONS` of the phase, again whenever their
            number has grown by half, at the latest every `REFIT_MOST` of them, and at once when its
            scale is off by more than `JUMP`. The first fit is made at once, later ones little by
            little while more observations come (`FIT_WORK`). Until then the phase is cold:
            `ColdStart`, never faster, and slower by the second largest ratio of measured to
            estimated time of the last cold iterations.
    scale   Median ratio of measured time to shape in the phase, drift taken out: what a shape gets
            wrong for the whole phase.
    drift   How much longer iterations take than others like them (`_cell`) took before, in the
            median of the last `DRIFT_WINDOW`: a machine that is suddenly slower or faster. One
            disturbed iteration does not move it, nor do batches of a new kind. But where the last
            two that could be compared say that it has changed (`CHANGE`), these count if they say
            the same of the scaled shape: where the machine changes, so do plans, and all that
            follows is of a new kind.
    growth  What has not been seen is not promised: beyond the largest iteration seen, in new
            tokens, attention pairs, decodes, or tokens of their contexts, time is assumed to grow
            in proportion to whichever is exceeded most. Time per token falls with the size of a
            batch, so that is too long rather than too short. It is finite, so a limit above the
            time of the largest iteration seen always admits a larger one. A given predictor is
            trusted at every size.
    margin  The second largest excess of the last `MARGIN_WINDOW` iterations over the estimate, or
            that of the very last one (at most twice the time): a change of the machine is answered
            at the next iteration, and one disturbed iteration forgotten after the next. What scale
            or drift explains meanwhile is no excess any more.
    error   1, unless an experiment sets it (`cosched.latency.wrong`). Nothing is learned about it:
            what is observed is compared with the estimate.

    Deterministic; all state is numbers. Nothing is learned until `observe` is called.
    """

    margin: float = 0.0
    """Share by which predictions are longer than the estimate."""

    def __init__(self, shape: Predictor | None = None, *, graphs: GraphSizes | None = None) -> None:
        """shape   predictor of this machine and model to start from, which keeps its form: only
                   scale and drift are learned; None: start cold and fit
        graphs     sizes with CUDA graphs, for fitting; None: there are none
        """
        self._decode = _Phase(shape)
        self._prefill = _Phase(shape)
        self._graphs = graphs
        self._cold_ratios: deque[float] = deque(maxlen=COLD_WINDOW)
        self._cold_scale = 1.0
        self._seen = _Seen() if shape is None else None
        self._recent: deque[_Observation] = deque(maxlen=MARGIN_WINDOW)
        self._drifts: deque[float] = deque(maxlen=DRIFT_WINDOW)
        self._compared: deque[float] = deque([1.0, 1.0], maxlen=2)
        """The last of them that were compared with others of their kind."""
        self._undecided: deque[tuple[BatchTotals, float]] = deque()
        self._kept: dict[tuple[int, ...], deque[_Kept]] = {}
        self._num_follow = 0
        self._fit: Steps[None] | None = None
        self.num_observed = 0
        self.num_fits = 0
        self.drift = 1.0
        """How many times longer iterations take now than the scaled shapes say."""
        self.error = 1.0
        """Factor by which predictions are wrong on purpose."""
        self.load_s_per_token = 0.0
        """A token of KV from host memory [s]."""

    @property
    def name(self) -> str:
        return "calibrated"

    def use_graphs(self, graphs: GraphSizes | None) -> None:
        """The sizes with CUDA graphs turned out to be others; before the first observation."""
        assert not self.num_observed, f"{self.num_observed=}"
        self._graphs = graphs

    @property
    def is_known(self) -> bool:
        """Neither phase is cold."""
        return all(self.knows(has_prefills=has) for has in (False, True))

    def knows(self, *, has_prefills: bool) -> bool:
        """The phase of such iterations is not cold."""
        phase = self._prefill if has_prefills else self._decode
        return phase.shape is not None

    def predict_s(self, totals: BatchTotals) -> float:
        seconds = self.estimate_s(totals) * (1 + self.margin)
        # Loading goes on beside the computation, layer by layer (max, as in BROS §4.1).
        return max(seconds, totals.num_loaded * self.load_s_per_token) * self.error

    def estimate_s(self, totals: BatchTotals) -> float:
        """The prediction without the margin [s]."""
        phase = self._prefill if totals.num_new else self._decode
        shape = phase.shape
        seconds = shape.predict_s(totals) * phase.scale if shape else self._cold_s(totals)
        seen = self._seen
        if seen is None or seen.covers(totals):
            return seconds * self.drift
        return seconds * self.drift * seen.growth(totals)

    def _cold_s(self, totals: BatchTotals) -> float:
        """Of an iteration whose phase is cold: what is known from the other phase, and the rest as
        from a cold start."""
        seconds = _COLD_START.predict_s(totals)
        prefill, decode = self._prefill, self._decode
        if not totals.num_new and prefill.shape is not None:
            # Decodes alone take no longer than with a token of prefill beside them.
            beside = totals.copy()
            beside.add_prefill(1, 0)
            beside_s = prefill.shape.predict_s(beside) * prefill.scale
            return min(seconds * self._cold_scale, beside_s)
        if decode.shape is None or not totals.num_decodes:
            return seconds * self._cold_scale
        alone = totals.decodes_only()
        rest = seconds - _COLD_START.predict_s(alone)
        return decode.shape.predict_s(alone) * decode.scale + rest * self._cold_scale

    def observe(self, batch: BatchShape, seconds: float) -> None:
        """Learn from an iteration that is done. ConfigError when it has no work or no time."""
        totals = BatchTotals.of(batch)
        if not (totals.num_new or totals.num_decodes) or not 0 < seconds < math.inf:
            raise ConfigError(f"cannot learn from an iteration of {seconds} s with {totals}")
        if totals.num_loaded:
            return  # it may have waited for that
        self.num_observed += 1
        phase = self._prefill if totals.num_new else self._decode
        if phase.shape is None:
            self._observe_cold(totals, seconds / self.drift)
        else:
            shape_s = phase.shape.predict_s(totals)
            ratio = seconds / shape_s
            self._follow_drift(phase.shape, phase.scale, totals, ratio)
            phase.add(ratio / self.drift)
            if self._seen is not None:
                shape_s *= self._seen.growth(totals)
            self._recent.append(_Observation(totals, seconds, phase, seconds / shape_s))
            self._update_margin()
        if self._seen is not None:
            self._seen.add(totals)
        self._keep(totals, seconds)
        self._go_on_fitting()

    def _observe_cold(self, totals: BatchTotals, seconds: float) -> None:
        self._cold_ratios.append(seconds / _COLD_START.predict_s(totals))
        ratios = sorted(self._cold_ratios)
        # Two of them cannot tell which one was disturbed: the slower.
        self._cold_scale = max(1.0, ratios[-2] if len(ratios) > 2 else ratios[-1])

    def _follow_drift(
        self, shape: Predictor, scale: float, totals: BatchTotals, ratio: float
    ) -> None:
        """shape, scale: of its phase. ratio: measured time to shape."""
        alike = self._kept.get(_cell(totals), ())
        if len(alike) >= LEAST_ALIKE:
            before = sorted([kept.seconds / kept.shape_s(shape) for kept in alike])
            latest = ratio / before[len(before) // 2]
            self._compared.append(latest)
        else:
            latest = ratio / scale
            has_changed = all(abs(d / self.drift - 1) > CHANGE for d in self._compared)
            if not has_changed or any(abs(latest / d - 1) > JUMP for d in self._compared):
                return
        self._drifts.append(latest)
        if len(self._drifts) < DRIFT_WINDOW:
            return
        median = sorted(self._drifts)[DRIFT_WINDOW // 2]
        if abs(median / self.drift - 1) > JUMP:
            self._num_follow = DRIFT_WINDOW
        if self._num_follow:
            self._num_follow -= 1
            self.drift = median

    def _update_margin(self) -> None:
        excesses = [o.ratio / o.phase.scale / self.drift - 1 for o in self._recent]
        latest = min(excesses[-1], 1.0)
        second = sorted(excesses)[-2] if len(excesses) > 1 else 0.0
        if second > CHANGE:
            second *= CHANGE_MARGIN
        self.margin = min(max(0.0, latest, second), MOST_MARGIN)

    def _keep(self, totals: BatchTotals, seconds: float) -> None:
        """Remember an observation for fitting, drift taken out. That waits until the iteration is
        in the middle of the window whose median is its drift."""
        self._undecided.append((totals, seconds))
        if len(self._undecided) <= DRIFT_WINDOW // 2:
            return
        totals, seconds = self._undecided.popleft()
        cell = self._kept.setdefault(_cell(totals), deque(maxlen=CELL_SIZE))
        cell.append(_Kept(totals, seconds / self.drift))
        phase = self._prefill if totals.num_new else self._decode
        phase.num_kept += 1
        if self._seen is None or not phase.is_due():
            return
        if phase.shape is None:
            phase.num_fitted = phase.num_kept
            finish(self._fitting())
            self._fit = None
        elif self._fit is None:
            phase.num_fitted = phase.num_kept
            self._fit = self._fitting()

    def _go_on_fitting(self) -> None:
        work = 0
        while self._fit is not None and work < FIT_WORK:
            try:
                work += STEP_WORK + next(self._fit)
            except StopIteration:
                self._fit = None

    def _fitting(self) -> Steps[None]:
        """Fit all phases that have enough observations."""
        phases = [p for p in (self._decode, self._prefill) if p.num_kept >= LEAST_OBSERVATIONS]
        observations = [kept for cell in self._kept.values() for kept in cell]
        table = yield from TotalsTable.of([kept.totals for kept in observations])
        seconds = np.array([kept.seconds for kept in observations])
        shape = yield from fit_phases(table, seconds, self._graphs)
        for phase in phases:
            phase.use(shape)
        again = [o._replace(ratio=o.seconds / shape.predict_s(o.totals)) for o in self._recent]
        self._recent = deque(again, maxlen=MARGIN_WINDOW)
        self.num_fits += 1

    def describe(self) -> dict[str, object]:
        return {
            "predictor": self.name,
            "num_observed": self.num_observed,
            "num_fits": self.num_fits,
            "drift": self.drift,
            "margin": self.margin,
            "cold_scale": self._cold_scale,
            "seen": None if self._seen is None else self._seen.describe(),
            "phases": {"decode": self._decode.describe(), "prefill": self._prefill.describe()},
        }


class _Observation(NamedTuple):
    """ratio: measured time over shape, neither scale nor drift taken out."""

    totals: BatchTotals
    seconds: float
    phase: _Phase
    ratio: float


class _Kept:
    """An observation kept for fitting and for comparison.

    seconds  measured time, drift taken out
    """

    __slots__ = ("_shape", "_shape_s", "seconds", "totals")

    def __init__(self, totals: BatchTotals, seconds: float) -> None:
        self.totals = totals
        self.seconds = seconds
        self._shape: Predictor | None = None
        self._shape_s = 0.0

    def shape_s(self, shape: Predictor) -> float:
        """What a shape says of it [s]; asked once per shape, as every new observation is compared
        with all like it."""
        if shape is not self._shape:
            self._shape, self._shape_s = shape, shape.predict_s(self.totals)
        return self._shape_s


class _Phase:
    """What is believed of one phase. shape is None while it is cold."""

    __slots__ = ("num_fitted", "num_kept", "ratios", "scale", "shape")

    def __init__(self, shape: Predictor | None) -> None:
        self.num_kept = 0
        self.num_fitted = 0
        self.use(shape)

    def use(self, shape: Predictor | None) -> None:
        self.shape = shape
        self.scale = 1.0
        self.ratios = deque([1.0] * (SCALE_WINDOW // 2), maxlen=SCALE_WINDOW)

    def add(self, ratio: float) -> None:
        """Ratio of measured time to shape, drift taken out."""
        self.ratios.append(ratio)
        self.scale = sorted(self.ratios)[len(self.ratios) // 2]

    def is_due(self) -> bool:
        """Whether to fit to the observations."""
        num_new = self.num_kept - self.num_fitted
        if num_new < LEAST_OBSERVATIONS:
            return False
        return abs(self.scale - 1) > JUMP or num_new >= min(
            self.num_fitted * REFIT_GROWTH, REFIT_MOST
        )

    def describe(self) -> dict[str, object]:
        return {
            "num_observed": self.num_kept,
            "scale": self.scale,
            "shape": (self.shape or _COLD_START).describe(),
        }


_COLD_START = ColdStart()


class _Seen:
    """The largest iteration seen, along each axis that a limit on extrapolation needs."""

    __slots__ = ("context", "decodes", "new", "pairs")

    def __init__(self) -> None:
        # What the first iteration may be, before any was seen.
        self.new = 16
        self.pairs = 2 * 16 * 1024
        self.decodes = 1
        self.context = 1024

    def add(self, totals: BatchTotals) -> None:
        self.new = max(self.new, totals.num_new)
        self.pairs = max(self.pairs, totals.double_pairs)
        self.decodes = max(self.decodes, totals.num_decodes)
        self.context = max(self.context, totals.decode_context)

    def covers(self, totals: BatchTotals) -> bool:
        return (
            totals.num_new <= self.new
            and totals.double_pairs <= self.pairs
            and totals.num_decodes <= self.decodes
            and totals.decode_context <= self.context
        )

    def growth(self, totals: BatchTotals) -> float:
        """How many times larger than anything seen; at least 1."""
        return max(
            1.0,
            totals.num_new / self.new,
            totals.double_pairs / self.pairs,
            totals.num_decodes / self.decodes,
            totals.decode_context / self.context,
        )

    def describe(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def _cell(totals: BatchTotals) -> tuple[int, ...]:
    """Which observations are alike: equal phase, and sizes equal to a factor of two."""
    return (
        totals.num_new.bit_length(),
        totals.max_prefill_context.bit_length(),
        totals.num_decodes.bit_length(),
        totals.decode_context.bit_length(),
    )
