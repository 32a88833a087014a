"""Reader of ServeGen's fitted production workloads (Alibaba Cloud Model Studio).

A folder such as ``data/language/m-large`` has two files per client ("chunk"): how it arrives, and
how long its requests are. Neither holds requests; those are drawn here.

``chunk-<i>-trace.csv``, no header: window start [s], rate [req/s], cv of the gaps, the pattern
fitted to the gaps (``Gamma``, ``Weibull`` or empty), its shape, its scale. A window ends where the
next begins (600 s).

``chunk-<i>-dataset.json``: ``{window start: {"input_tokens": "{100: 0.5, 200: 0.5}",
"output_tokens": "{...}"}}``, each a Python dictionary in text: length to probability.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.files import numbered_lines
from cosched_traces.lengths import Tokens
from cosched_traces.seeds import key_base, rng_of
from cosched_traces.workload import Segment, TraceRequest, Workload

LAST_WINDOW_S = 600.0
FIELDS = ("input_tokens", "output_tokens")


class Window(NamedTuple):
    """One row of a client's trace."""

    start_s: float
    end_s: float
    rate: float
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Lengths and their probabilities."""

    tokens: Tokens
    probabilities: npt.NDArray[np.float64]


class Drawn(NamedTuple):
    arrival_s: float
    client: str
    num_prompt_tokens: int
    num_output_tokens: int


def read_servegen(
    folder: Path,
    *,
    seed: int,
    start_s: float = 0.0,
    duration_s: float,
    rate: float | None = None,
    name: str | None = None,
    request_class: RequestClass = RequestClass.ONLINE,
) -> Workload:
    """Requests of all clients in ``[start_s, start_s + duration_s)``, drawn from the fits.

    Gaps of a client's window follow its pattern and shape, scaled to a mean of 1/rate, which is
    more exact than the fitted scale. Prompt and output lengths are independent, as published; a
    length of 0 becomes 1. A window of rate 0 has no requests; one without a pattern is a Poisson
    process. With `rate` the rates of all clients are scaled so that their sum is `rate`. Raises
    `RowError` for bad rows and `WorkloadError` for a client without lengths in a window in which it
    sends."""
    clients = sorted(path.name.split("-")[1] for path in folder.glob("chunk-*-trace.csv"))
    if not clients:
        raise WorkloadError(f"{folder}: no chunk-*-trace.csv here")
    end_s = start_s + duration_s
    windows = {
        client: _cut(list(_windows(folder / f"chunk-{client}-trace.csv")), start_s, end_s)
        for client in clients
    }
    offered = (
        sum(w.rate * (w.end_s - w.start_s) for kept in windows.values() for w in kept) / duration_s
    )
    if offered <= 0:
        raise WorkloadError(f"{folder}: no client sends between {start_s:g} and {end_s:g} s")
    factor = 1.0 if rate is None else rate / offered
    drawn: list[Drawn] = []
    for client, kept in windows.items():
        lengths = _lengths(folder / f"chunk-{client}-dataset.json")
        for window in kept:
            rng = rng_of(seed, "servegen", client, str(window.start_s))
            drawn.extend(_draw(client, window, lengths=lengths, factor=factor, rng=rng))
    drawn.sort()
    name = name or f"servegen-{folder.name}"
    base = key_base(name, seed)
    requests = tuple(
        TraceRequest(
            rid=f"{name}-{index}",
            request_class=request_class,
            arrival_s=item.arrival_s - start_s,
            num_output_tokens=item.num_output_tokens,
            segments=(Segment(base + index, item.num_prompt_tokens),),
        )
        for index, item in enumerate(drawn)
    )
    note = f"drawn from {len(clients)} clients of {folder.name}, rates times {factor:.4g}, {seed=}"
    return Workload(name=name, requests=requests, notes=(note,))


def _windows(path: Path) -> Iterator[Window]:
    rows: list[tuple[float, float, str, float]] = []
    for line, text in numbered_lines(path):
        cells = next(csv.reader([text]), [])
        if not cells:
            continue
        if len(cells) != 6:
            raise RowError(path, line, f"{len(cells)} cells where a window has 6")
        try:
            start_s, rate, _, shape = (float(cells[index]) for index in (0, 1, 2, 4))
        except ValueError as error:
            raise RowError(path, line, str(error)) from None
        pattern = cells[3]
        if pattern not in ("", "Gamma", "Weibull"):
            raise RowError(path, line, f"pattern {pattern!r} is none of Gamma, Weibull, empty")
        if not 0 <= rate < math.inf or (pattern and not shape > 0):
            raise RowError(path, line, f"rate {rate} or shape {shape} out of range")
        if rows and start_s <= rows[-1][0]:
            raise RowError(path, line, f"window {start_s:g} s does not follow {rows[-1][0]:g} s")
        rows.append((start_s, rate, pattern, shape))
    ends = [row[0] for row in rows[1:]] + [row[0] + LAST_WINDOW_S for row in rows[-1:]]
    for (start_s, rate, pattern, shape), end_s in zip(rows, ends, strict=True):
        yield Window(start_s, end_s, rate, pattern, shape)


def _cut(windows: list[Window], start_s: float, end_s: float) -> list[Window]:
    """The windows in which the client sends, cut to the time asked for."""
    return [
        w._replace(start_s=max(w.start_s, start_s), end_s=min(w.end_s, end_s))
        for w in windows
        if w.rate > 0 and w.start_s < end_s and w.end_s > start_s
    ]


def _draw(
    client: str,
    window: Window,
    *,
    lengths: dict[float, tuple[Histogram, Histogram]],
    factor: float,
    rng: np.random.Generator,
) -> Iterator[Drawn]:
    rate, length_s = window.rate * factor, window.end_s - window.start_s
    times = np.empty(0)
    while not times.size or times[-1] < length_s:
        size = int(1.2 * rate * length_s) + 16
        gaps = _gaps(window, size, rng) / rate
        # The first gap is cut at random: the window begins in the middle of one.
        last = times[-1] if times.size else -gaps[0] * rng.random()
        times = np.concatenate([times, last + np.cumsum(gaps)])
    times = times[(times >= 0) & (times < length_s)]
    known = [start for start in lengths if start <= window.start_s]
    if not known:
        raise WorkloadError(f"client {client}: no lengths at or before {window.start_s:g} s")
    prompt, output = lengths[max(known)]
    for time, num_prompt, num_output in zip(
        times.tolist(),
        rng.choice(prompt.tokens, size=len(times), p=prompt.probabilities).tolist(),
        rng.choice(output.tokens, size=len(times), p=output.probabilities).tolist(),
        strict=True,
    ):
        yield Drawn(window.start_s + time, client, max(num_prompt, 1), max(num_output, 1))


def _gaps(window: Window, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Gaps of mean 1."""
    if window.pattern == "Gamma":
        return rng.gamma(window.shape, 1 / window.shape, size=size)
    if window.pattern == "Weibull":
        return rng.weibull(window.shape, size=size) / math.gamma(1 + 1 / window.shape)
    return rng.exponential(size=size)


def _lengths(path: Path) -> dict[float, tuple[Histogram, Histogram]]:
    """Histograms by the start of their window; empty ones are left out, as ServeGen's loader
    does."""
    try:
        data = json.loads("".join(line for _, line in numbered_lines(path)))
    except json.JSONDecodeError as error:
        raise RowError(path, error.lineno, f"no JSON: {error.msg}") from None
    found = {}
    for start, fields in data.items():
        try:
            prompt, output = (ast.literal_eval(fields[field]) for field in FIELDS)
            if prompt and output:
                found[float(start)] = (_histogram(prompt), _histogram(output))
        except (KeyError, ValueError, SyntaxError, TypeError) as error:
            raise WorkloadError(f"{path}: window {start!r}: {error!r}") from None
    return found


def _histogram(given: dict[int, float]) -> Histogram:
    weights = np.array(list(given.values()), dtype=float)
    if not (weights >= 0).all() or abs(weights.sum() - 1) > 1e-6:
        raise ValueError(f"probabilities sum to {weights.sum()}")
    tokens = np.array(list(given), dtype=np.int64)
    return Histogram(tokens=tokens, probabilities=weights / weights.sum())
