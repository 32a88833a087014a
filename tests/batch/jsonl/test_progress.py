"""What the progress display shows, and when it does not know the time left."""

import msgspec
import pytest

from cosched.batch.jsonl.batch_api import RemoteBatch
from cosched.batch.jsonl.client import Trouble
from cosched.batch.jsonl.report import Meter, Reporter, Snapshot, _progress_text, print_batches


def text_at(meter, now_s, **state):
    snapshot = Snapshot(**{"num_lines": 1000, "num_done": 0, "num_failed": 0} | state)
    return _progress_text(snapshot, meter.rates(snapshot, now_s=now_s))


def test_the_time_left_is_known_once_as_many_lines_are_done_as_are_in_flight():
    meter = Meter(now_s=0.0, num_done=0)
    text = text_at(meter, 30.0, num_in_flight=256)
    assert text == "0/1000 lines (0.0%), 256 in flight"
    meter = Meter(now_s=0.0, num_done=0)
    early = text_at(meter, 30.0, num_done=3, num_in_flight=100, num_tokens=300)
    assert "0.1 lines/s, 10 tokens/s" in early and "left" not in early
    later = text_at(meter, 60.0, num_done=200, num_in_flight=100, num_tokens=6000)
    assert "about 4 min left" in later
    resumed = Meter(now_s=0.0, num_done=900)
    assert "left" not in text_at(resumed, 10.0, num_done=905, num_in_flight=50)


def test_lines_of_a_batch_that_are_being_answered_count_in_part():
    text = text_at(
        Meter(now_s=0.0, num_done=0), 4.0, num_in_flight=1000, num_begun=412.5, left_s=6.2
    )
    assert text == "0/1000 lines (41.2%), 1000 in flight, about 6 s left"


@pytest.mark.parametrize(
    ("rate", "left"), [(1000.0, "1 s"), (10.0, "100 s"), (1.0, "17 min"), (0.01, "28 h")]
)
def test_the_time_left_is_rounded(rate, left):
    meter = Meter(now_s=0.0, num_done=0)
    text = text_at(meter, 10 / rate, num_done=10, num_in_flight=10, num_lines=1010)
    assert f"about {left} left" in text


def test_trouble_is_shown_in_full(capsys):
    reason = "ConnectError: " + "a long reason " * 30
    trouble = Trouble(waited_s=12.0, limit_s=600.0, reason=reason)
    reporter = Reporter(every_s=0.0, num_done=0)
    reporter.show(Snapshot(num_lines=10, num_done=1, num_failed=0, trouble=trouble))
    shown = capsys.readouterr().err
    assert "no answer for 12 s of at most 600" in shown and reason in shown


@pytest.mark.parametrize(
    ("forecast", "shown"),
    [
        ({"finish_s": 12.4}, "12 s"),
        ({"finish_s": None, "state": "paused"}, "paused"),
        ({"device_seconds": 3.5}, None),
    ],
)
def test_a_batch_with_all_its_results_has_no_expected_time(forecast, shown, capsys):
    shape = {"id": "batch_1", "status": "completed", "cosched": forecast}
    print_batches([msgspec.convert(shape, RemoteBatch)], is_fetched=lambda batch: False)
    table = capsys.readouterr().out.rpartition('{"program"')[0]
    assert "measured" not in table
    assert shown is None or shown in table
