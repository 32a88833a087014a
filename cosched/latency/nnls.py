"""Least squares with coefficients that cannot be negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cosched.latency.interp import FloatArray
from cosched.latency.steps import Steps, finish

__all__ = ["SOLVE_WORK", "nnls_normal", "nnls_normal_steps"]

SOLVE_WORK = 30
"""Entries of arrays that one could touch in the time that solving takes, for each of the
matrix."""


def nnls_normal(gram: FloatArray, moments: FloatArray) -> FloatArray:
    """Least squares from the normal equations: the x >= 0 that minimises x' gram x - 2 moments' x
    (Lawson and Hanson 1974, algorithm 23.10).

    gram = matrix' matrix and moments = matrix' target; they are as large as the number of columns
    whatever the number of rows, and sums over parts of the rows may be added. The search begins
    with every column in use (Bro and de Jong 1997), as most of them stay. Squaring the matrix costs
    half the digits: differences between columns below 1e-7 of their size are lost.
    """
    return finish(nnls_normal_steps(gram, moments))


def nnls_normal_steps(gram: FloatArray, moments: FloatArray) -> Steps[FloatArray]:
    """`nnls_normal`, a system of equations at a time."""
    scale = np.sqrt(np.diag(gram))
    used = scale > 0
    scale = np.where(used, scale, 1.0)
    a = gram / np.outer(scale, scale)
    b = moments / scale
    # Columns that say the same would make the equations singular: 1e-12 decides between them.
    a[np.diag_indices_from(a)] += 1e-12
    x = np.zeros(len(b))
    passive = used.copy()
    tolerance = 1e-9 * max(1e-300, float(np.abs(b).max(initial=0.0)))
    for _ in range(10 * len(b)):
        while passive.any():
            yield SOLVE_WORK * a.size
            trial = np.zeros(len(b))
            trial[passive] = np.linalg.solve(a[np.ix_(passive, passive)], b[passive])
            negative = passive & (trial <= 0)
            if not negative.any():
                x = trial
                break
            # From a feasible x: towards the trial solution until a coefficient reaches zero. From
            # the start, where x is zero, this drops all negative ones at once.
            x, blocking = _towards(trial, x, negative)
            passive &= ~(blocking | (negative & (x <= 1e-14)))
            x[~passive] = 0.0
        gradient = b - a @ x
        gradient[passive | ~used] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
    return x / scale


def _towards(
    trial: FloatArray, x: FloatArray, negative: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """As far from x towards a trial solution as no coefficient falls below zero, and which of the
    negative ones are the first to reach it: one at least, whatever rounding leaves of it."""
    way = np.where(negative, x - trial, 1.0)
    steps = np.where(negative & (way > 0), x / np.where(way > 0, way, 1.0), np.inf)
    steps[negative & (way <= 0)] = 0.0
    least = float(steps.min())
    return x + least * (trial - x), negative & (steps <= least)
