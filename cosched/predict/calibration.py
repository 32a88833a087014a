"""Learning how long iterations take while the server runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from statistics import NormalDist

import numpy as np

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.estimates import Predictor
from cosched.errors import ConfigError
from cosched.predict.fitted import FloatArray, GraphSizes, TotalsTable
from cosched.predict.linear import PhaseCosts

SCALE_WINDOW = 33
"""Iterations whose median ratio of measured to predicted time is the scale."""
MARGIN_WINDOW = 16
MOST_MARGIN = 2.0
"""Two disturbed iterations that come close together do not stop everything."""

CELL_SIZE = 24
"""Newest iterations of a kind (`_cell`) that are kept for fitting."""
LEAST_OBSERVATIONS = 32
"""Iterations of a phase before its first fit."""
LEAST_NEW, REFIT_GROWTH, MOST_NEW = 8, 0.25, 256
"""New iterations of a phase before the next fit: this share of all it has seen, between two
bounds."""
FIT_AT_ONCE = 256
"""A fit to no more iterations than this is made with the one that asks for it."""
MOST_GROWTH = 1.1
"""Iterations that are larger than what is known by more say nothing about the scale."""
REFIT_ERROR = 0.15
"""A scale that is off by more asks for a fit."""
NUM_ALIKE = 3
"""Iterations that are compared with earlier ones of their kind: one disturbed one is no change."""


def cold_start_s(totals: BatchTotals) -> float:
    """What is assumed of a machine that has not been measured: some eight times what an A100 takes
    for an 8B model, and its 12 ms that an iteration takes at least, rounded up."""
    return (
        15e-3
        + 0.5e-3 * (totals.num_new + totals.num_decodes)
        + 1e-6 * totals.decode_context
        + 1e-8 * totals.double_pairs
    )


class Calibrator(Predictor):
    """A predictor that learns from the iterations it is shown.

        estimate = shape * scale * growth
        prediction = estimate * (1 + margin)

    There are two phases: iterations with a prefill, and decode-only ones.

    shape   The predictor it was given, or one fitted to the newest iterations of each kind
            (`_cell`) of the phase, those of a profile among them. Until `LEAST_OBSERVATIONS` of
            them the phase is cold: `cold_start_s`, slower by the median ratio of the last cold
            iterations, never faster.
    scale   Median ratio of measured time to shape over the last `SCALE_WINDOW` iterations. If it is
            off by more than `REFIT_ERROR`, the shape is fitted again. It may be wrong for what runs
            now. Only if iterations of the same kind took less or more time before (`_change`), the
            machine has changed, and older times are scaled.
    growth  Beyond the largest iteration known (`_known`) time is assumed to grow in proportion to
            whatever is exceeded most. Time per token falls with the size of a batch, so that is too
            long rather than too short; and as it is finite, a limit above the time of the largest
            iteration always admits a larger one. A predictor that keeps its form is trusted at
            every size.
    margin  The second largest excess over the estimate of the last `MARGIN_WINDOW` iterations: a
            quantile of the errors that one disturbed iteration does not move.

    A fit to many iterations takes as long as some iterations do: it is made in steps, one with each
    iteration that is observed, and counts when all are done. So no plan waits for it, and what is
    predicted depends on the iterations alone.

    Deterministic. Nothing is learned until `observe` is called.
    """

    margin: float = 0.0
    """Share by which predictions are longer than the estimate."""

    def __init__(
        self,
        shape: Predictor | None = None,
        *,
        graphs: GraphSizes | None = None,
        points: Sequence[tuple[BatchShape, float]] = (),
        corrects: bool = True,
    ) -> None:
        """shape   predictor of this machine and model; None: start cold
        graphs     sizes with CUDA graphs, for fitting; None: there are none
        points     iterations and their times [s] that the shape was fitted to: it is fitted again
                   to these and to what is observed; without them a given shape keeps its form
        corrects   False: predictions are those of a given shape, without scale and margin
        """
        assert corrects or (shape is not None and not points), "it must know what it predicts"
        self._corrects = corrects
        self._phases = {has_prefills: _Phase(shape) for has_prefills in (False, True)}
        self._graphs = graphs
        self._known: _Sizes | None = None if shape and not points else _Sizes()
        if self._known is not None:
            self._begin_with(points, self._known)
        self._recent: deque[_Observation] = deque(maxlen=SCALE_WINDOW)
        self._fit: Generator[None, None, None] | None = None
        """The fit that is under way."""
        self.num_observed = 0
        self.num_fits = 0
        self.scale = 1.0
        """How many times longer iterations take now than the shapes say."""
        self.error = 1.0
        """Factor by which predictions are wrong on purpose (`error_factor`); not learned from."""
        self.load_s_per_token = 0.0
        """A token of KV from host memory [s]."""

    def _begin_with(self, points: Sequence[tuple[BatchShape, float]], known: _Sizes) -> None:
        for batch, seconds in points:
            totals = BatchTotals.of(batch)
            known.add(totals)
            self._phases[totals.num_new > 0].begin_with(totals, seconds)
        known.fitted_new = known.new

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
        return all(phase.shape is not None for phase in self._phases.values())

    @property
    def knows_prefills(self) -> bool:
        """Iterations with a prefill are not cold; decodes without one are estimated from them until
        they are known themselves."""
        return self._phases[True].shape is not None

    def knows(self, totals: BatchTotals) -> bool:
        """Iterations of such sizes have been seen, or a predictor was given."""
        phase = self._phases[totals.num_new > 0]
        if totals.num_encoded and not phase.knows_encoder:
            return False
        return phase.shape is not None and self._growth(totals) < MOST_GROWTH

    def predict_s(self, totals: BatchTotals) -> float:
        seconds = self.estimate_s(totals) * (1 + self.margin)
        if totals.num_loaded:
            # Loading runs beside the computation, layer by layer (max, as in BROS §4.1).
            seconds = max(seconds, totals.num_loaded * self.load_s_per_token)
        return seconds * self.error

    def estimate_s(self, totals: BatchTotals) -> float:
        """The prediction without the margin [s]."""
        seconds = self.extrapolated_s(totals)
        known = None if self._phases[totals.num_new > 0].shape is None else self._known
        return seconds if known is None else seconds * known.growth(totals)

    def extrapolated_s(self, totals: BatchTotals) -> float:
        """The same without growth: also beyond the largest iteration known the shape is trusted.
        For what is not decided by, as it may be too short [s]."""
        if not totals.num_new and not totals.num_decodes:
            return 0.0
        shape = self._phases[totals.num_new > 0].shape
        return self._cold_s(totals) if shape is None else shape.predict_s(totals) * self.scale

    def _cold_s(self, totals: BatchTotals) -> float:
        """Of an iteration whose phase is cold, by what is known of the other phase: decodes take no
        longer than with a token of prefill beside them; beside known decodes, only what the prefill
        adds is guessed. Else a cold phase might never fit into a budget, and stay cold."""
        decode, prefill = self._phases[False], self._phases[True]
        seconds = cold_start_s(totals)
        if not totals.num_new and prefill.shape is not None:
            beside = totals.copy()
            beside.add_prefill(1, 0)
            return min(seconds * decode.cold_scale, prefill.shape.predict_s(beside) * self.scale)
        if totals.num_new and totals.num_decodes and decode.shape is not None:
            decodes = totals.decodes_only()
            added = seconds - cold_start_s(decodes)
            return decode.shape.predict_s(decodes) * self.scale + added * prefill.cold_scale
        return seconds * self._phases[totals.num_new > 0].cold_scale

    def observe(self, batch: BatchShape | BatchTotals, seconds: float) -> None:
        """Learn from an iteration that is done. ConfigError when it has no work or no time."""
        totals = batch if isinstance(batch, BatchTotals) else BatchTotals.of(batch)
        if not (totals.num_new or totals.num_decodes) or not 0 < seconds < math.inf:
            raise ConfigError(f"cannot learn from an iteration of {seconds} s with {totals}")
        if totals.num_loaded:
            return  # it may have waited for that
        self.num_observed += 1
        if not self._corrects:
            return
        phase = self._phases[totals.num_new > 0]
        observed = _Observation(self.num_observed, totals, seconds)
        if phase.shape is not None and self.knows(totals):
            self._compare(observed)
            self._recent.append(observed)
            self._update_scale()
        if self._known is not None:
            phase.keep(observed)
            self._known.add(totals)
            if self._fit is None and phase.is_due(is_off=_is_off(self.scale)):
                self._fit = self._fitting()
            self._go_on_fitting()

    def _go_on_fitting(self) -> None:
        is_short = sum(phase.kept.num for phase in self._phases.values()) <= FIT_AT_ONCE
        while self._fit is not None:
            try:
                next(self._fit)
            except StopIteration:
                self._fit = None
            if not is_short:
                break

    def _growth(self, totals: BatchTotals) -> float:
        return 1.0 if self._known is None else self._known.growth(totals)

    def _update_scale(self) -> None:
        ratios = [o.ratio for o in self._recent]
        is_enough = len(ratios) > SCALE_WINDOW // 2
        self.scale = sorted(ratios)[len(ratios) // 2] if is_enough else 1.0
        newest = sorted(ratios[-MARGIN_WINDOW:])
        second = newest[-2] if len(newest) > 1 else 1.0
        self.margin = min(max(0.0, second / self.scale - 1), MOST_MARGIN)

    def _compare(self, observed: _Observation) -> None:
        """With the shape, and with earlier iterations of its kind."""
        totals = observed.totals
        phase = self._phases[totals.num_new > 0]
        assert phase.shape is not None, "it is not cold"
        observed.ratio = observed.seconds / (phase.shape.predict_s(totals) * self._growth(totals))
        observed.usual_ratio = phase.usual_ratio(totals)

    def _change(self) -> float:
        """How many times longer the latest iterations of known kinds take than those of their kind
        did. There may be few: plans change with the machine."""
        changes = [o.ratio / o.usual_ratio for o in self._recent if o.usual_ratio is not None]
        latest = sorted(changes[-NUM_ALIKE:])
        return latest[NUM_ALIKE // 2] if len(latest) == NUM_ALIKE else 1.0

    def _fitting(self) -> Generator[None, None, None]:
        """Fit the phases that have enough observations, in steps."""
        change = self._change()
        if _is_off(change):
            before = self._recent[0].number
            for phase in self._phases.values():
                phase.kept.rescale(change, before=before)
        assert self._known is not None, "a given predictor keeps its form"
        num_new, graphs = self._known.new, self._graphs
        shapes: dict[bool, PhaseCosts] = {}
        for has_prefills, phase in self._phases.items():
            sizes = () if graphs is None else graphs.prefill if has_prefills else graphs.decode
            if phase.num_kept >= LEAST_OBSERVATIONS:
                shapes[has_prefills] = yield from phase.fitting(sizes, has_prefills=has_prefills)
                yield
        for has_prefills, found in shapes.items():
            self._phases[has_prefills].fitted(found)
        self.num_fits += 1
        self._known.fitted_new = num_new
        for observed in self._recent:
            self._compare(observed)
        self._update_scale()

    def describe(self) -> dict[str, object]:
        decode, prefill = (phase.describe() for phase in self._phases.values())
        return {
            "predictor": self.name,
            "num_observed": self.num_observed,
            "num_fits": self.num_fits,
            "scale": self.scale,
            "margin": self.margin,
            "known": None if self._known is None else self._known.describe(),
            "phases": {"decode": decode, "prefill": prefill},
        }


@dataclass(slots=True)
class _Observation:
    """ratio         measured time over shape and growth
    usual_ratio  of earlier iterations of its kind; None: there were none
    """

    number: int
    totals: BatchTotals
    seconds: float
    ratio: float = 1.0
    usual_ratio: float | None = None


def _is_off(scale: float) -> bool:
    return abs(scale - 1) > REFIT_ERROR


class _Phase:
    """What is learned of one phase. shape is None while it is cold."""

    def __init__(self, shape: Predictor | None) -> None:
        self.shape: Predictor | PhaseCosts | None = shape
        self.cold_scale = 1.0
        self.num_kept = 0
        self.kept = _Kept()
        self.knows_encoder = False
        """The shape was fitted to iterations with media."""
        self._num_encoded = self._num_in_fit = 0
        """Iterations with media: all, and those of the latest fit."""
        self._num_fitted = 0
        self._cold_ratios: deque[float] = deque(maxlen=LEAST_OBSERVATIONS)
        self._usual_ratios: dict[tuple[int, ...], float | None] = {}
        """Of each kind, as it was when it came first after the last fit."""

    def keep(self, observed: _Observation) -> None:
        self.kept.add(observed)
        self.num_kept += 1
        self._num_encoded += observed.totals.num_encoded > 0
        if self.shape is None:
            self._cold_ratios.append(observed.seconds / cold_start_s(observed.totals))
            ratios = sorted(self._cold_ratios)
            # On a GPU the first iterations of a kind compile kernels, for seconds.
            # Two do not show which one was disturbed: the slower.
            middle = (len(ratios) - 1) // 2 if len(ratios) > 2 else -1
            self.cold_scale = max(1.0, ratios[middle])

    def begin_with(self, totals: BatchTotals, seconds: float) -> None:
        """An iteration that the shape was fitted to."""
        self.kept.add(_Observation(0, totals, seconds))
        self.num_kept = self._num_fitted = self.num_kept + 1

    def is_due(self, *, is_off: bool) -> bool:
        """Whether to fit. is_off: the scale is."""
        num_new = self.num_kept - self._num_fitted
        if self.num_kept < LEAST_OBSERVATIONS or num_new < LEAST_NEW:
            return False
        is_off |= self._num_encoded >= LEAST_NEW and not self.knows_encoder
        return is_off or num_new >= min(self._num_fitted * REFIT_GROWTH, MOST_NEW)

    def fitting(
        self, graphs: tuple[int, ...], *, has_prefills: bool
    ) -> Generator[None, None, PhaseCosts]:
        self._num_fitted = self.num_kept
        table, seconds = self.kept.table()
        self._num_in_fit = self._num_encoded
        return PhaseCosts.fitting(table, seconds, graphs, has_prefills=has_prefills)

    def fitted(self, shape: PhaseCosts) -> None:
        """A fit is done."""
        self.shape = shape
        self.knows_encoder = self._num_in_fit > 0
        self._usual_ratios.clear()

    def usual_ratio(self, totals: BatchTotals) -> float | None:
        """Median ratio of measured time to shape of the kept iterations of this kind, as it was
        soon after the last fit; None: there were none."""
        cell = _cell(totals)
        if cell not in self._usual_ratios:
            assert self.shape is not None, "it is not cold"
            kept = self.kept.of_kind(cell)
            ratios = sorted(seconds / self.shape.predict_s(each) for each, seconds in kept)
            self._usual_ratios[cell] = ratios[len(ratios) // 2] if ratios else None
        return self._usual_ratios[cell]

    def describe(self) -> dict[str, object]:
        shape = None if self.shape is None else self.shape.describe()
        return {"num_observed": self.num_kept, "shape": shape}


class _Kept:
    """The newest iterations of each kind (`_cell`), as columns of an array: a fit of thousands
    reads them at once.

    num  how many there are
    """

    def __init__(self) -> None:
        self.num = 0
        self._columns = np.empty((len(_FIELDS) + 2, 2 * LEAST_OBSERVATIONS))
        """Totals, then seconds and the number of the iteration."""
        self._cells: dict[tuple[int, ...], deque[int]] = {}
        """Places of each kind, the oldest first."""

    def add(self, observed: _Observation) -> None:
        cell = self._cells.setdefault(_cell(observed.totals), deque(maxlen=CELL_SIZE))
        # The oldest goes; a point of a profile as soon as one like it has been measured here.
        if len(cell) == CELL_SIZE or (observed.number and cell and not self._columns[-1, cell[0]]):
            place = cell.popleft()
        else:
            place = self.num
            self.num += 1
            if place == self._columns.shape[1]:
                self._columns = np.hstack((self._columns, np.empty_like(self._columns)))
        cell.append(place)
        self._columns[:, place] = (*_fields(observed.totals), observed.seconds, observed.number)

    def of_kind(self, cell: tuple[int, ...]) -> Iterator[tuple[BatchTotals, float]]:
        """Totals and seconds."""
        for place in self._cells.get(cell, ()):
            *values, seconds, _ = self._columns[:, place].tolist()
            totals = BatchTotals()
            for name, value in zip(_FIELDS, values, strict=True):
                setattr(totals, name, int(value))
            yield totals, seconds

    def rescale(self, factor: float, *, before: int) -> None:
        """What was observed before iteration `before` counts as that many times longer."""
        seconds, number = self._columns[-2:, : self.num]
        seconds[number < before] *= factor

    def table(self) -> tuple[TotalsTable, FloatArray]:
        """A copy; and the seconds."""
        places = np.fromiter(chain.from_iterable(self._cells.values()), dtype=int, count=self.num)
        *totals, seconds, _ = self._columns[:, places]
        return TotalsTable(**dict(zip(_FIELDS, totals, strict=True))), seconds


_FIELDS = tuple(field.name for field in fields(TotalsTable))
_fields = attrgetter(*_FIELDS)


class _Sizes:
    """The largest iteration known, along each axis that a limit on extrapolation needs.

    fitted_new  new tokens when the shape was fitted, and not those seen since: some hundred tokens
                more take no time, as the weights are read anyway, and some thousand more do
    """

    __slots__ = ("context", "decodes", "fitted_new", "new", "pairs")

    def __init__(self) -> None:
        # What the first iteration may be, before any was seen.
        self.new = self.fitted_new = 16
        self.pairs = 2 * 16 * 1024
        self.decodes = 1
        self.context = 1024

    def add(self, totals: BatchTotals) -> None:
        self.new = max(self.new, totals.num_new)
        self.pairs = max(self.pairs, totals.double_pairs)
        self.decodes = max(self.decodes, totals.num_decodes)
        self.context = max(self.context, totals.decode_context)

    def growth(self, totals: BatchTotals) -> float:
        """How many times larger than what is known; at least 1."""
        if (
            totals.num_new <= self.fitted_new
            and totals.double_pairs <= self.pairs
            and totals.num_decodes <= self.decodes
            and totals.decode_context <= self.context
        ):
            return 1.0  # nearly always
        return max(
            1.0,
            totals.num_new / self.fitted_new,
            totals.double_pairs / self.pairs,
            totals.num_decodes / self.decodes,
            totals.decode_context / self.context,
        )

    def describe(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def _cell(totals: BatchTotals) -> tuple[int, ...]:
    """Iterations of one kind: sizes equal to a factor of two."""
    return (
        totals.num_new.bit_length(),
        totals.max_prefill_context.bit_length(),
        totals.num_decodes.bit_length(),
        totals.decode_context.bit_length(),
        totals.num_encoded.bit_length(),
    )


def error_factor(error: float, number: int) -> float:
    """What the predictions of one plan are multiplied by in experiments on how much a policy
    depends on its predictor (HyGen §5.4): lognormal, exp(s * z - s**2 / 2), with mean 1 and
    standard deviation `error`. A hash of the plan's number takes the place of chance, so it is the
    same on every rank and in every run; 1.0 where `error` is 0."""
    if not error:
        return 1.0
    drawn = int.from_bytes(blake2b(b"%d" % number, digest_size=6).digest())
    z = NormalDist().inv_cdf((drawn + 0.5) / 2**48)
    variance = math.log1p(error**2)
    return math.exp(math.sqrt(variance) * z - variance / 2)
