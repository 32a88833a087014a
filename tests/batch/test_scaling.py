"""How many replicas the windows of batches need."""

from __future__ import annotations

import pytest

from cosched.batch.batch_records import Status
from cosched.batch.forecast import Forecast
from cosched.batch.prometheus import Snapshot, exposition
from cosched.batch.scaling import needed_ratio, replicas_wanted
from tests.batch.test_store import batch_of

MARGIN_S = 600.0


def forecast(work_s):
    """At the measured rate of all servers it takes so long."""
    times = dict.fromkeys(("finish_s", "most_s", "slack_s", "miss_chance"), 0.0)
    return Forecast(work_s=work_s, is_late=False, **times)


def needed(*batches):
    """batches: (time of the work, end of the window) [s]"""
    found = [batch_of(id=f"batch_{i}", expires_at=due) for i, (_, due) in enumerate(batches)]
    known = {f"batch_{i}": forecast(work_s) for i, (work_s, _) in enumerate(batches)}
    return needed_ratio(found, known, now=0, margin_s=MARGIN_S)


def test_the_tightest_end_of_a_window_counts_with_all_that_is_due_by_then():
    assert needed() == 0
    assert needed((3000, 6600)) == 0.5
    assert needed((3000, 6600), (9000, 12600)) == 1.0
    assert needed((3000, 6600), (100, 86400)) == 0.5, "what has time needs little"
    assert needed((300, 600)) == 1.0, "of a short window half may be margin"


def test_batches_want_what_chat_leaves_until_a_rate_is_known():
    assert needed_ratio([batch_of()], {}, now=0, margin_s=MARGIN_S) == 1.0
    ended = batch_of(status=Status.COMPLETED)
    assert needed_ratio([ended], {}, now=0, margin_s=MARGIN_S) == 0.0


def test_parts_of_servers_add_up_to_the_replicas_that_do_it_all():
    """Chat leaves 60 % of each of two servers, which does half of what the windows need."""
    assert sum(replicas_wanted(0.4, 2.0) for _ in range(2)) == pytest.approx(0.8 + 2.4)
    assert replicas_wanted(1.3, 0.0) == 1.3
    assert replicas_wanted(1.3, 2.0) > 1.3, "batches count although chat leaves nothing"


def test_it_is_a_metric_where_chat_is_known():
    common = {"now": 0, "num_by_status": {}, "open": (), "outlooks": {}, "in_flight": {}}
    common |= {"finished": {}, "tokens_per_s": None}
    assert b"cosched:replicas_wanted 1.5" in exposition(Snapshot(**common, replicas_wanted=1.5))
    assert b"\ncosched:replicas_wanted" not in exposition(Snapshot(**common))
