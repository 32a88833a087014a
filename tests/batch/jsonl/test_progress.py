"""What the progress says, and what it does not pretend to know."""

import pytest

from cosched.batch.jsonl.client import Trouble
from cosched.batch.jsonl.progress import Meter, PlainLines, Snapshot, _text


def text_at(meter, now_s, **state):
    snapshot = Snapshot(**{"num_lines": 1000, "num_done": 0, "num_failed": 0} | state)
    return _text(snapshot, meter.rates(snapshot, now_s=now_s))


def test_before_the_first_answer_there_is_no_rate_and_no_time_left():
    text = text_at(Meter(now_s=0.0, num_done=0), 30.0, num_under_way=256)
    assert text == "0/1000 lines (0.0%), 256 under way"


def test_the_first_bunch_says_nothing_of_the_rest():
    meter = Meter(now_s=0.0, num_done=0)
    early = text_at(meter, 30.0, num_done=3, num_under_way=100, num_tokens=300)
    assert "0.1 lines/s, 10 tokens/s" in early and "left" not in early
    later = text_at(meter, 60.0, num_done=200, num_under_way=100, num_tokens=6000)
    assert "about 4 min left" in later


def test_lines_of_earlier_calls_are_no_evidence():
    meter = Meter(now_s=0.0, num_done=900)
    assert "left" not in text_at(meter, 10.0, num_done=905, num_under_way=50)


@pytest.mark.parametrize(
    ("rate", "left"), [(1000.0, "1 s"), (10.0, "100 s"), (1.0, "17 min"), (0.01, "28 h")]
)
def test_the_time_left_is_rounded_to_what_can_be_known(rate, left):
    meter = Meter(now_s=0.0, num_done=0)
    done = 10
    text = text_at(meter, done / rate, num_done=done, num_under_way=10, num_lines=1010)
    assert f"about {left} left" in text


def test_trouble_is_told_whole(capsys):
    reason = "ConnectError: " + "a long reason " * 30
    lines = PlainLines(Meter(now_s=0.0, num_done=0), every_s=0.0)
    trouble = Trouble(waited_s=12.0, limit_s=600.0, reason=reason)
    lines.show(Snapshot(num_lines=10, num_done=1, num_failed=0, trouble=trouble))
    shown = capsys.readouterr().err
    assert "no answer for 12 s of at most 600" in shown and reason in shown
