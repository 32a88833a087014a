"""`python -m cosched.explain` on logs written by hand."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.core.request import LateReason
from cosched.explain import main
from tests.factories import FakeView, decoding, offline, online
from tests.recorded import Recorder, batch_of


@pytest.fixture
def explain(capsys):
    """`explain(*arguments)` -> (lines for people, the last line's object, stderr)."""

    def run(*arguments):
        main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last), err

    return run


@pytest.fixture
def refused(capsys):
    """`refused(*arguments)` -> the sentence with which it exits."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run


class Steps(Recorder):
    def step(self, plan, view, *batch, **options):
        self.run(view, *batch, plan=plan, **options)


@pytest.fixture
def recorder(tmp_path):
    return Steps(tmp_path / "log")


LATE = SkipReason.LATENCY_BUDGET
FULL = SkipReason.MEMORY_BUDGET


def stopped_and_resumed(recorder):
    """The life of the offline request `f`: it waits, runs, is stopped for `a`, held and ends."""
    first, f = offline("first", 90, arrival_s=1.0), offline("f", 100, arrival_s=1.0)
    a = online("a", 10, arrival_s=1.5)
    run = decoding(f, 1)
    pool = [first, f]
    seen = {"first": LATE, "f": FULL}
    recorder.step(Plan(), FakeView(online=[a], now_s=0.5))
    recorder.step(Plan(skipped={"first": LATE}), FakeView(offline=pool, now_s=1.1))
    recorder.step(Plan(skipped=seen), FakeView(offline=pool, now_s=1.2))
    recorder.step(Plan(skipped=seen), FakeView(offline=pool, now_s=1.3))
    recorder.step(Plan(prefill={"f": 64}), FakeView(offline=[f], now_s=1.4), f)
    part = replace(f, num_computed_tokens=64)
    recorder.step(Plan(prefill={"f": 36}), FakeView(unfinished=(part,), now_s=1.45), f)
    recorder.step(Plan(), FakeView(running=(run,), now_s=1.5), run)
    stop = Plan(preempt=(Preemption(rid="f"),), prefill={"a": 10})
    recorder.step(stop, FakeView(running=(run,), online=[a], now_s=1.6), a)
    back = replace(f, num_output_tokens=2, num_prefix_tokens=101)
    recorder.step(Plan(skipped={"f": FULL}), FakeView(offline=[back], now_s=1.7))
    recorder.step(Plan(prefill={"f": 1}), FakeView(offline=[back], now_s=1.8), back)
    run = decoding(f, 3)
    held = Plan(paused=frozenset({"f"}), skipped={"f": LATE})
    for now_s in (2.0, 2.1):
        recorder.step(held, FakeView(running=(run, decoding(a)), now_s=now_s), decoding(a))
    recorder.step(Plan(), FakeView(running=(run,), now_s=2.2), run, finishing=("f",))
    recorder.step(Plan(), FakeView(now_s=3.0))


class TestStory:
    def test_everything_that_happened_is_told_in_its_order(self, recorder, explain):
        stopped_and_resumed(recorder)
        lines, result, _ = explain(recorder.path, "--rid", "f")
        assert lines == [
            "f: offline request, 100 prompt tokens, at most 10 output tokens. Seconds since it "
            "arrived, at 1.000 s of the engine's clock:",
            "     0.000  waited 0.400 s in 3 iterations: memory budget in 2, not its turn in 1",
            "     0.400  admitted with 0 tokens cached; prefilled 100 tokens in 2 chunks, 0.100 s",
            "     0.500  decoded 1 token in 0.100 s",
            "     0.600  preempted for online a, its KV kept in the radix tree",
            "     0.600  waited 0.200 s in 1 iteration: memory budget",
            "     0.800  resumed with 101 tokens cached; prefilled 1 token in 1 chunk, 0.200 s",
            "     1.000  decoded 1 token in 0.210 s; paused in 2 of 3 iterations (at most 2 in a "
            "row): latency budget",
            "     1.210  finished with 3 output tokens: length",
        ]
        (story,) = result["stories"]
        assert story["is_over"] and len(story["events"]) == len(lines) - 1
        assert story["events"][-1] == {
            "at_s": pytest.approx(2.21),
            "text": "finished with 3 output tokens: length",
        }

    def test_a_waiting_request_that_was_aborted_waits_no_longer(self, recorder, explain):
        a, b = online("a", 100), online("b", 100)
        both = Plan(skipped={"a": FULL, "b": FULL})
        recorder.step(both, FakeView(online=[a, b], now_s=1.0))
        recorder.log.on_aborted(b)
        recorder.step(Plan(skipped={"a": FULL}), FakeView(online=[a], now_s=2.0))
        lines, result, _ = explain(recorder.path, "--rid", "b")
        assert lines[-1] == "     2.000  no longer waits: aborted"
        assert result["stories"][0]["is_over"]
        assert explain(recorder.path, "--rid", "a")[0][-1].endswith("the log ends")

    def test_an_unreachable_target_and_a_paused_prefill_are_told(self, recorder, explain):
        a = online("a", 100, num_prefix_tokens=40)
        plan = Plan(prefill={"a": 20}, late={"a": LateReason.TOO_LONG})
        recorder.step(plan, FakeView(online=[a], now_s=1.0), a)
        part = replace(a, num_computed_tokens=60)
        recorder.step(Plan(skipped={"a": FULL}), FakeView(unfinished=(part,), now_s=2.0))
        texts = [line[12:] for line in explain(recorder.path, "--rid", "a")[0][1:]]
        assert texts == [
            "admitted with 40 tokens cached; prefilled 20 tokens in 1 chunk, 1.000 s",
            "its TTFT target is unreachable: too long",
            "its prefill pauses",
            "waited 0.010 s in 1 iteration: memory budget",
            "the log ends",
        ]

    def test_what_the_engine_refuses_or_sends_back_is_told(self, recorder, explain):
        f = offline("f", 100)
        recorder.step(Plan(prefill={"f": 100}), FakeView(offline=[f], now_s=1.0))
        recorder.step(Plan(prefill={"f": 100}), FakeView(offline=[f], now_s=2.0), f)
        run = decoding(f)
        recorder.step(Plan(), FakeView(running=(run,), now_s=3.0), run)
        recorder.step(Plan(skipped={"f": FULL}), FakeView(offline=[f], now_s=4.0))
        texts = [line[12:] for line in explain(recorder.path, "--rid", "f")[0][1:]]
        assert texts == [
            "waited 2.000 s in 1 iteration: the engine refused it",
            "admitted with 0 tokens cached; prefilled 100 tokens in 1 chunk, 1.000 s",
            "decoded 1 token in 1.000 s",
            "sent back to wait by the engine",
            "waited 0.010 s in 1 iteration: memory budget",
            "the log ends",
        ]

    def test_a_dropped_plan_does_not_count(self, recorder, explain):
        f = offline("f", 100)
        run = decoding(f)
        view = FakeView(running=(run,), now_s=1.0)
        recorder.plan(view, Plan(preempt=(Preemption(rid="f"),)))
        recorder.step(Plan(), view, run)
        texts = [line[12:] for line in explain(recorder.path, "--rid", "f")[0][1:]]
        assert texts == ["decoded 1 token in 0.010 s", "the log ends"]

    def test_when_older_parts_are_gone_the_story_begins_with_the_log(self, tmp_path, explain):
        recorder = Steps(tmp_path / "log", max_bytes=12_000)
        run = decoding(offline("f", 100), 1)
        for i in range(100):
            recorder.step(Plan(), FakeView(running=(run,), now_s=10.0 + i), run)
        lines, *_ = explain(recorder.path, "--rid", "f")
        first = explain(recorder.path)[1]["first_s"]
        assert first > 10
        assert lines[1] == f"{first:10.3f}  the log begins"
        assert f"decoded {110 - first:.0f} tokens" in lines[2]


def test_one_iteration_is_shown_in_full(recorder, explain):
    stopped_and_resumed(recorder)
    lines, result, _ = explain(recorder.path, "--iteration", "7")
    shown = {line[2:20].strip(): line[20:] for line in lines}
    assert (shown["iteration"], shown["now_s"], shown["outcome"]) == ("7", "1.6", "ran")
    assert (shown["running"], shown["prefill"]) == ("f", "a 10")
    assert shown["preempt"] == "f keep_kv"
    assert result["plan"]["preempt"] == [{"rid": "f", "mode": "keep_kv"}]
    assert result["measured_s"] == 0.01
    assert (result["plan"]["prefill"], result["cached"]) == ({"a": 10}, {"a": 0})


def test_the_summary_counts_what_was_decided(recorder, explain):
    stopped_and_resumed(recorder)
    lines, result, _ = explain(recorder.path)
    assert result["outcomes"] == {"ran": 14}
    assert result["requests"] == {"online": 1, "offline": 2}
    assert result["skipped"] == {"latency budget": 5, "memory budget": 3}
    assert (result["paused"], result["preempted"]) == (2, {"keep_kv": 1})
    assert result["prefill_tokens"] == {"offline": 101, "online": 10}
    assert result["finished"] == {"length": 1}
    assert any("the id of a response" in line and "--rid ID" in line for line in lines)
    assert result["prediction_error"] is None
    assert result["planning_us"]["mean"] == pytest.approx(100)
    assert any("latency budget 5, memory budget 3" in line for line in lines)


def test_predictions_are_compared_with_measured_times(recorder, explain):
    run = decoding(online("a", 30), 1)
    for seconds in (0.01, 0.02):
        recorder.plan(FakeView(running=(run,)))
        iteration = recorder.launch(batch_of(run), predicted_s=0.015)
        recorder.end(iteration, batch_of(run), start_s=0.0, seconds=seconds)
    assert explain(recorder.path, "--iteration", "0")[1]["predicted_s"] == 0.015
    _, result, _ = explain(recorder.path)
    assert result["prediction_error"]["bias"] == pytest.approx((0.5 - 0.25) / 2)
    assert result["prediction_error"]["mean"] == pytest.approx((0.5 + 0.25) / 2)


class TestBadLines:
    def test_each_is_named_and_the_rest_is_read(self, recorder, explain):
        stopped_and_resumed(recorder)
        lines = recorder.path.read_bytes().splitlines(keepends=True)
        lines[3] = lines[3][:40] + b"\n"
        lines[5] = lines[5].replace(b'"now_s":1.4', b'"now_s":"soon"')
        recorder.path.write_bytes(b"".join(lines)[:-9])
        _, result, err = explain(recorder.path)
        assert result["bad_lines"] == 3
        places = [line.removeprefix(f"{recorder.path}:").split(": ", 1) for line in err.split("\n")]
        named = {int(place): reason for place, reason in places[:-1]}
        assert set(named) == {4, 6, 15}
        assert "malformed" in named[4] and "truncated" in named[15]
        assert "Expected `float`, got `str` - at `$.now_s`" in named[6]
        assert result["outcomes"] == {"ran": 11}

    def test_a_part_without_a_header_is_left_out(self, recorder, explain):
        stopped_and_resumed(recorder)
        older = recorder.path.with_name(recorder.path.name + "-000000")
        older.write_text("nonsense\nmore\n")
        content = recorder.path.read_text()
        assert '"part":0' in content
        recorder.path.write_text(content.replace('"part":0', '"part":1', 1))
        _, result, err = explain(recorder.path)
        assert result["bad_lines"] == 1 and "so this part is left out" in err
        assert result["outcomes"]["ran"] > 10


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--iteration", "99"], "no iteration 99"),
        (["--iteration", "99"], "it holds 0 to 13"),
        (["--rid", "nope"], "cosched: no request 'nope' in "),
        (["--rid", "nope"], "Its requests (each the id of a response): first, f, a"),
    ],
)
def test_what_the_log_does_not_hold_is_said_beside_what_it_holds(recorder, refused, asked, said):
    stopped_and_resumed(recorder)
    assert said in refused(recorder.path, *asked)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cosched: cannot read "),
        ("a\nb\nc\n", "is no decision log: it does not begin with a header"),
        ('"format":99', "has format 99; this version of cosched reads format 5"),
    ],
)
def test_a_file_that_is_no_log_of_this_version_is_refused(recorder, refused, text, said):
    header = recorder.path.read_text().replace('"format":5', '"format":99')
    recorder.path.unlink()
    if text is not None:
        recorder.path.write_text(header if "format" in text else text)
    shown = refused(recorder.path)
    assert said in shown and shown.count("\n") == 1


def test_help_explains_and_sglang_is_not_needed():
    """A log can be read where SGLang is not installed."""
    code = "import sys; sys.modules['sglang'] = None; from cosched.explain import main; "
    shown = subprocess.run(
        [sys.executable, "-c", code + "main(['--help'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the story of one request" in shown.stdout and "--iteration" in shown.stdout


def test_a_reader_that_ends_first_is_no_error(recorder):
    """As in ``cosched explain FILE | head -1``."""
    stopped_and_resumed(recorder)
    command = [sys.executable, "-m", "cosched", "explain", str(recorder.path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer.stdout.close()
    _, said = writer.communicate()
    assert writer.returncode == 1 and b"BrokenPipe" not in said
