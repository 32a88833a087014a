"""`python -m cosched.explain` on logs written by hand."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.explain import main
from cosched.latency.calibration import Calibrator
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


class Script:
    """A policy that gives plans in turn."""

    def __init__(self):
        self.plans = []

    initial = None

    def plan(self, view, carry):
        list(view.online)
        for request in [*view.unfinished, *view.online]:
            view.match(request)
        plan = self.plans.pop(0)
        # It looks as far into the pool as the plan names requests.
        named = {*plan.prefill, *plan.skipped}
        for request in view.offline_order():
            if request.rid not in named:
                break
            view.match(request)
        return plan, None


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path / "log", policy=Script())


def step(recorder, plan, view, *batch, **options):
    recorder.policy.plans.append(plan)
    recorder.run(view, *batch, **options)


LATE = SkipReason.LATENCY_BUDGET
FULL = SkipReason.MEMORY_BUDGET


def stopped_and_resumed(recorder):
    """The life of the offline request `f`: it waits, runs, is stopped for `a`, held and ends."""
    first, f = offline("first", 90, arrival_s=1.0), offline("f", 100, arrival_s=1.0)
    a = online("a", 10, arrival_s=1.5)
    run = decoding(f, 1)
    pool = [first, f]
    seen = {"first": LATE, "f": FULL}
    step(recorder, Plan(), FakeView(online=[a], now_s=0.5))
    step(recorder, Plan(skipped={"first": LATE}), FakeView(offline=pool, now_s=1.1))
    step(recorder, Plan(skipped=seen), FakeView(offline=pool, now_s=1.2))
    step(recorder, Plan(skipped=seen), FakeView(offline=pool, now_s=1.3))
    step(recorder, Plan(prefill={"f": 64}), FakeView(offline=[f], now_s=1.4), f)
    part = replace(f, num_computed_tokens=64)
    step(recorder, Plan(prefill={"f": 36}), FakeView(unfinished=(part,), now_s=1.45), f)
    step(recorder, Plan(), FakeView(running=(run,), now_s=1.5), run)
    stop = Plan(preempt=(Preemption(rid="f"),), prefill={"a": 10})
    step(recorder, stop, FakeView(running=(run,), online=[a], now_s=1.6), a)
    back = replace(f, num_output_tokens=2)
    step(recorder, Plan(skipped={"f": FULL}), FakeView(offline=[back], now_s=1.7))
    step(recorder, Plan(prefill={"f": 1}), FakeView(offline=[back], now_s=1.8), f)
    run = decoding(f, 3)
    held = Plan(hold=frozenset({"f"}), skipped={"f": LATE})
    for now_s in (2.0, 2.1):
        step(recorder, held, FakeView(running=(run, decoding(a)), now_s=now_s), decoding(a))
    step(recorder, Plan(), FakeView(running=(run,), now_s=2.2), run, finishing=("f",))
    step(recorder, Plan(), FakeView(now_s=3.0))


class TestStory:
    def test_everything_that_happened_is_told_in_its_order(self, recorder, explain):
        stopped_and_resumed(recorder)
        lines, result, _ = explain(recorder.path, "--rid", "f")
        assert lines == [
            "f: offline request, 100 prompt tokens, at most 10 new ones. Seconds since it "
            "arrived, at 1.000 s of the engine's clock:",
            "     0.000  waited 0.200 s in 1 iteration: not its turn",
            "     0.200  waited 0.200 s in 2 iterations: memory budget",
            "     0.400  admitted with 0 of 100 tokens cached; prefilled 100 tokens in 2 chunks, "
            "0.100 s",
            "     0.500  decoded 1 token in 0.100 s",
            "     0.600  stopped for online a, its KV kept in the radix tree",
            "     0.600  waited 0.200 s in 1 iteration: memory budget",
            "     0.800  resumed with 0 of 102 tokens cached; prefilled 1 token in 1 chunk, "
            "0.200 s",
            "     1.000  decoded 1 token in 0.210 s; held in 2 of 3 iterations (at most 2 in a "
            "row): latency budget",
            "     1.210  finished with 3 output tokens: length",
        ]
        (story,) = result["stories"]
        assert story["is_over"]
        assert next(c for c in story["chapters"] if "stopped" in c)["for"] == ["a"]
        assert story["chapters"][-1]["num_output_tokens"] == 3

    def test_many_changes_of_reason_are_summed_up(self, recorder, explain):
        f = offline("f", 100)
        for i in range(20):
            reason = LATE if i % 2 else FULL
            step(recorder, Plan(skipped={"f": reason}), FakeView(offline=[f], now_s=i + 1.0))
        lines, *_ = explain(recorder.path, "--rid", "f")
        assert lines[1:] == [
            "     0.000  waited 20.010 s in 20 iterations: memory budget in 10, latency budget "
            "in 10",
            "    20.010  the log ends",
        ]

    def test_an_online_request_that_vanishes_was_aborted(self, recorder, explain):
        a, b = online("a", 100), online("b", 100)
        step(recorder, Plan(skipped={"a": FULL}), FakeView(online=[a, b], now_s=1.0))
        step(recorder, Plan(skipped={"a": FULL}), FakeView(online=[a], now_s=2.0))
        lines, result, _ = explain(recorder.path, "--rid", "b")
        assert lines[-1] == "     2.000  no longer waits: aborted"
        assert result["stories"][0]["is_over"]
        assert explain(recorder.path, "--rid", "a")[0][-1].endswith("the log ends")

    def test_a_request_that_is_passed_over_still_waits(self, recorder, explain):
        a, b = offline("a", 100), offline("b", 100)
        everyone = Plan(skipped={"a": FULL, "b": FULL})
        step(recorder, everyone, FakeView(offline=[a, b], now_s=1.0))
        step(recorder, Plan(skipped={"a": FULL}), FakeView(offline=[a], now_s=2.0))
        assert explain(recorder.path, "--rid", "b")[0][-1].endswith("aborted")
        lines = recorder.path.read_text().splitlines(keepends=True)
        skips = f'"order":[["skip_sharing",[{a.arrival_seq},64],null],'
        lines[-1] = lines[-1].replace('"order":[', skips)
        recorder.path.write_text("".join(lines))
        told, *_ = explain(recorder.path, "--rid", "b")
        assert told[-2:] == [
            "     2.000  waited 0.010 s in 1 iteration: not its turn",
            "     2.010  the log ends",
        ]

    def test_what_the_engine_refuses_or_sends_back_is_told(self, recorder, explain):
        f = offline("f", 100)
        step(recorder, Plan(prefill={"f": 100}), FakeView(offline=[f], now_s=1.0))
        step(recorder, Plan(prefill={"f": 100}), FakeView(offline=[f], now_s=2.0), f)
        run = decoding(f)
        step(recorder, Plan(), FakeView(running=(run,), now_s=3.0), run)
        step(recorder, Plan(skipped={"f": FULL}), FakeView(offline=[f], now_s=4.0))
        texts = [line[12:] for line in explain(recorder.path, "--rid", "f")[0][1:]]
        assert texts == [
            "waited 2.000 s in 1 iteration: the engine refused it",
            "admitted with 0 of 100 tokens cached; prefilled 100 tokens in 1 chunk, 1.000 s",
            "decoded 1 token in 1.000 s",
            "sent back to wait by the engine",
            "waited 0.010 s in 1 iteration: memory budget",
            "the log ends",
        ]

    def test_a_dropped_plan_does_not_count(self, recorder, explain):
        f = offline("f", 100)
        run = decoding(f)
        view = FakeView(running=(run,), now_s=1.0)
        recorder.policy.plans.append(Plan(preempt=(Preemption(rid="f"),)))
        recorder.plan(view)
        step(recorder, Plan(), view, run)
        texts = [line[12:] for line in explain(recorder.path, "--rid", "f")[0][1:]]
        assert texts == ["decoded 1 token in 0.010 s", "the log ends"]

    def test_when_older_parts_are_gone_the_story_begins_with_the_log(self, tmp_path, explain):
        recorder = Recorder(tmp_path / "log", policy=Script(), max_bytes=12_000)
        run = decoding(offline("f", 100), 1)
        for i in range(100):
            step(recorder, Plan(), FakeView(running=(run,), now_s=10.0 + i), run)
        lines, result, _ = explain(recorder.path, "--rid", "f")
        first = explain(recorder.path)[1]["first_s"]
        assert first > 10
        assert lines[1] == f"{first:10.3f}  the log begins"
        assert result["stories"][0]["chapters"][1]["decoded"] == 110 - first


def test_one_iteration_is_shown_in_full(recorder, explain):
    stopped_and_resumed(recorder)
    lines, result, _ = explain(recorder.path, "--iteration", "7")
    shown = {line[2:20].strip(): line[20:] for line in lines[1:]}
    assert lines[0] == "iteration 7, planned at 1.600 s to begin at 0.000 s"
    assert shown["running"] == "f" and shown["waiting online"] == "a"
    assert shown["prefill tokens"] == "a 10 after 0 cached"
    assert shown["stopped"] == "f (keep_kv)"
    assert shown["outcome"] == "it ran"
    assert result["stopped"] == {"f": "keep_kv"} and result["measured_s"] == 0.01
    assert result["prefill"] == [{"rid": "a", "num_tokens": 10, "num_cached": 0}]


def test_an_iteration_that_is_not_there_names_those_that_are(recorder, refused):
    stopped_and_resumed(recorder)
    assert "no iteration 99" in refused(recorder.path, "--iteration", "99")
    assert "it holds 0 to 13" in refused(recorder.path, "--iteration", "99")


def test_a_request_that_is_not_there_is_one_sentence(recorder, refused):
    stopped_and_resumed(recorder)
    shown = refused(recorder.path, "--rid", "nope")
    assert shown.startswith("cosched: no request 'nope' in ")
    assert "Its requests (each the id of a response): a, first, f" in shown


def test_the_summary_counts_what_was_decided(recorder, explain):
    stopped_and_resumed(recorder)
    lines, result, _ = explain(recorder.path)
    assert result["outcomes"] == {"ran": 14}
    assert result["requests"] == {"online": 1, "offline": 2}
    assert result["skipped"] == {"latency budget": 5, "memory budget": 3}
    assert (result["held"], result["stopped"]) == (2, {"keep_kv": 1})
    assert result["prefill_tokens"] == {"offline": 101, "online": 10}
    assert result["finished"] == {"length": 1}
    assert any("the id of a response" in line and "--rid ID" in line for line in lines)
    assert result["prediction_error"] is None
    assert result["planning_us"]["mean"] == pytest.approx(100)
    assert any("latency budget 5, memory budget 3" in line for line in lines)


def test_predictions_are_held_against_measurements(tmp_path, explain):
    recorder = Recorder(tmp_path / "log", predictor=Calibrator(), name="hygen")
    run = decoding(online("a", 30), 1)
    view = FakeView(running=(run,))
    for seconds in (0.01, 0.02):
        recorder.plan(view)
        recorder.end(recorder.launch(batch_of(run)), batch_of(run), start_s=0.0, seconds=seconds)
    _, result, _ = explain(recorder.path)
    predicted = explain(recorder.path, "--iteration", "0")[1]["predicted_s"]
    errors = [(predicted - seconds) / seconds for seconds in (0.01, 0.02)]
    assert predicted > 0
    assert result["prediction_error"]["bias"] == pytest.approx(sum(errors) / 2)


def test_plans_made_again_are_compared(tmp_path, explain):
    recorder = Recorder(tmp_path / "log")
    f, a = offline("f", 700), online("a", 100)
    recorder.run(FakeView(online=[a], offline=[f]), a, f)
    lines, result, _ = explain(recorder.path, "--replan")
    assert lines[0].startswith("sarathi: 1 of 1 plans are equal, 1 do the same work; 0 could not")
    assert (result["num_plans"], result["num_equal"], result["first_difference"]) == (1, 1, None)
    tampered = recorder.path.read_text().replace(f"[{a.arrival_seq},100]", f"[{a.arrival_seq},99]")
    recorder.path.write_text(tampered)
    lines, result, _ = explain(recorder.path, "--replan", "--policy", "sarathi")
    assert result["num_equal"] == 0
    assert lines[1] == (
        "first difference: iteration 0 at 0.000 s: prefill was a: 99, f: 412, now a: 100, f: 412"
    )


class TestAnotherPolicyPlans:
    def test_of_what_the_recorded_one_looked_at(self, tmp_path, explain):
        """The recorded one looked at the first of two that wait; the other would have gone on."""
        first, second = offline("first", 100), offline("second", 100)

        class OnlyTheFirst:
            initial = None

            def plan(self, view, carry):
                request = next(view.offline_order())
                view.match(request)
                return Plan(prefill={request.rid: 100}), None

        recorder = Recorder(tmp_path / "log", policy=OnlyTheFirst(), name="hygen-fcfs")
        recorder.run(FakeView(offline=[first, second]), first)
        lines, result, _ = explain(recorder.path, "--replan", "--policy", "sarathi")
        assert (result["num_unanswered"], result["num_cut"], result["num_same_work"]) == (0, 1, 1)
        assert "1 plans are of the requests that the recorded policy looked at" in lines[1]

    def test_that_asks_for_what_the_log_never_holds_is_refused(self, tmp_path, refused):
        recorder = Recorder(tmp_path / "log")
        f = offline("f", 700)
        for _ in range(25):
            recorder.run(FakeView(running=(decoding(online("a", 30), 1),), offline=[f]))
        message = refused(recorder.path, "--replan", "--policy", "hygen-fcfs")
        assert "policy 'hygen-fcfs' cannot plan from a log of 'sarathi'" in message
        assert "asks for a prediction, which was not recorded" in message
        assert message.count("\n") == 1

    def test_one_that_plans_nothing_is_refused(self, recorder, refused):
        assert "leaves all decisions" in refused(recorder.path, "--replan", "--policy", "sglang")


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
        assert "Expected `float`, got `str` - at `$.view.now_s`" in named[6]
        assert result["outcomes"] == {"ran": 11}

    def test_what_no_line_describes_any_more_is_not_guessed(self, recorder, explain):
        stopped_and_resumed(recorder)
        lines = recorder.path.read_bytes().splitlines(keepends=True)
        assert b'"rid":"f"' in lines[2]
        recorder.path.write_bytes(b"".join(lines[:2] + lines[3:]))
        _, result, err = explain(recorder.path)
        assert f"{recorder.path}:3: it names request " in err
        assert result["bad_lines"] == 11 and result["requests"] == {"online": 1, "offline": 0}

    def test_each_is_told_once_though_the_log_is_read_twice(self, recorder, explain):
        stopped_and_resumed(recorder)
        with recorder.path.open("ab") as file:
            file.write(b"nonsense\n")
        _, result, err = explain(recorder.path, "--rid", "f")
        assert (err.count("\n"), result["bad_lines"]) == (1, 1)

    def test_without_a_header_nothing_can_be_read(self, recorder, refused):
        stopped_and_resumed(recorder)
        recorder.path.write_bytes(recorder.path.read_bytes().split(b"\n", 1)[1])
        message = refused(recorder.path)
        assert "is no decision log: it does not begin with a header (no header before it" in message
        assert message.count("\n") == 1

    def test_a_file_that_is_no_log_is_one_sentence(self, tmp_path, refused):
        (tmp_path / "other").write_text("a\nb\nc\n")
        assert refused(tmp_path / "other").count("\n") == 1

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

    def test_another_format_is_refused(self, recorder, refused):
        content = recorder.path.read_text().replace('"format":3', '"format":99')
        recorder.path.write_text(content)
        assert "has format 99; this version of cosched reads format 3" in refused(recorder.path)

    def test_a_file_that_is_not_there_is_one_sentence(self, tmp_path, refused):
        assert refused(tmp_path / "absent").startswith("cosched: argument FILE: cannot read ")


def test_policy_alone_means_nothing(recorder, refused):
    assert "--policy goes with --replan" in refused(recorder.path, "--policy", "sarathi")


def test_help_explains_and_sglang_is_not_needed():
    """A log can be read where SGLang is not installed."""
    code = "import sys; sys.modules['sglang'] = None; import runpy; " + (
        "runpy.run_module('cosched.explain', run_name='__main__')"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    )
    assert "the story of one request" in shown.stdout and "--iteration" in shown.stdout
