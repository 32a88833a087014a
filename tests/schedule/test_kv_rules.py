"""What offline requests may take of the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.papers.hygen.sarathi import SarathiPolicy
from cosched.schedule.builder import PlanBuilder
from tests.factories import FakeView, decoding, make_caps, offline, online

CAPS = make_caps(max_chunk_tokens=8192, max_prefill_tokens=8192)


def view_of(*waiting, running=0, **fields):
    """waiting: prompt tokens of offline requests; running: tokens that one of them holds. There are
    10,000 in all."""
    return FakeView(
        caps=CAPS,
        running=(decoding(offline("running", running)),) if running else (),
        offline=tuple(offline(name, n) for name, n in zip("abc", waiting, strict=False)),
        **fields,
    )


def plan(view):
    made, _ = SarathiPolicy().plan(view, None)
    return made


@pytest.mark.parametrize(
    ("view", "admitted"),
    [
        pytest.param(view_of(2500, running=2000, kept=6000), "", id="one is too much"),
        pytest.param(view_of(2500, running=2000, kept=5000), "a", id="it fits"),
        pytest.param(view_of(1500, 1500, 1500, running=1000, kept=5500), "ab", id="those before"),
        pytest.param(view_of(3000, 3000, kept=9000), "a", id="one may always run"),
        pytest.param(
            view_of(3000, 100, kept=9500, offline_in_sessions=1000), "a", id="sessions do not run"
        ),
        pytest.param(
            replace(
                view_of(2500, running=2000, kept=6000, evictable_kv=2400),
                cached={"a": Match(cached=2400, evictable=0)},
            ),
            "a",
            id="its cached head is held by another request",
        ),
        pytest.param(
            replace(
                view_of(2500, running=2000, kept=6000, evictable_kv=2400),
                cached={"a": Match(cached=2400, evictable=2400)},
            ),
            "",
            id="no request holds its cached head",
        ),
    ],
)
def test_offline_requests_leave_what_is_reserved_for_online_ones(view, admitted):
    made = plan(view)
    assert [*made.prefill] == [*admitted]
    left_out = "abc"[len(admitted) : len(view.offline)]
    assert not left_out or made.skipped[left_out[0]] is SkipReason.ONLINE_RESERVE
    with_chat = plan(replace(view, online=(online("chat", 3000),)))
    assert "chat" in with_chat.prefill, "online requests are not bound by it"


def test_stopping_an_offline_request_gives_its_part_back():
    view = view_of(3000, running=4000, kept=4000)
    builder = PlanBuilder(view)
    request = view.offline[0]
    assert not builder.admit(request, view.match(request), 3000)
    builder.preempt(view.running[0])
    assert builder.admit(request, view.match(request), 3000)
