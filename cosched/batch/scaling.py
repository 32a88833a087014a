"""How many replicas chat and the windows of batches need, for autoscalers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cosched.batch.batch_records import WITH_LINES, Batch
from cosched.batch.forecast import Forecast

_LEAST_REST = 0.05
"""Part of a server that chat is assumed to leave at least."""


def replicas_wanted(saturation: float, needed: float) -> float:
    """A server's part of the replicas that its chats and all windows need together; the sum over
    the servers is how many there should be.

    saturation  what chat needs of this server (`cosched.predict.saturation`)
    needed      `needed_ratio`. The rate is measured beside chat, so it is what the rest of the
                servers does: as many rests more do that much more
    """
    return saturation + max(1 - saturation, _LEAST_REST) * needed


def needed_ratio(
    batches: Sequence[Batch], forecasts: Mapping[str, Forecast], *, now: float, margin_s: float
) -> float:
    """Part of the measured rate that the windows of open batches need: the work that is due by the
    end of a window over the time until then, the most of all ends. Above 1 a window will be missed.

    forecasts  empty: no rate is known yet; then batches need what chat leaves
    margin_s   by which work is to end before its window, but half of the time at most [s]
    """
    open_batches = [batch for batch in batches if batch.status in WITH_LINES]
    if open_batches and not forecasts:
        return 1.0
    work_s = most = 0.0
    for batch in sorted(open_batches, key=lambda batch: batch.expires_at):
        if batch.id in forecasts:
            work_s += forecasts[batch.id].work_s
            left_s = max(batch.expires_at - now, 1.0)
            most = max(most, work_s / max(left_s - margin_s, left_s / 2))
    return most
