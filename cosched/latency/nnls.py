"""Least squares with coefficients that cannot be negative."""

from __future__ import annotations

import numpy as np

from cosched.latency.interp import FloatArray

__all__ = ["nnls"]


def nnls(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 that minimises |matrix x - target| (Lawson and Hanson 1974, algorithm 23.10).

    Columns are scaled to equal length inside, so features of very different size are no problem.
    Columns of zeros get coefficient 0.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    used = lengths > 0
    a = matrix / np.where(used, lengths, 1.0)
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    passive = np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(10 * num_columns):
        gradient = a.T @ (target - a @ x)
        gradient[passive | ~used] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            trial = np.zeros(num_columns)
            trial[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                x = trial
                break
            # Go towards the trial solution until the first coefficient reaches zero; drop it.
            steps = x[negative] / (x[negative] - trial[negative])
            x = x + float(steps.min()) * (trial - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
            if not passive.any():
                break
    return x / np.where(used, lengths, 1.0)
