"""The decision log: what is recorded, and that it suffices to plan again."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import Config, parse_config
from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.request import Request, RequestClass, Slo
from cosched.core.view import Ended, Match, View
from cosched.decision_log.read import read_log
from cosched.decision_log.replan import replan
from cosched.decision_log.view import NotRecordedError, RecordedView
from cosched.engine.decision_records import Decision, Header, Outcome
from cosched.engine.decisions import RecordingView
from cosched.engine.observe import Iteration
from cosched.engine.parts import NUM_PARTS, parts_of
from cosched.errors import ConfigError
from cosched.metrics.records import record_line
from cosched.offline.prefix_pool import PoolConfig, PrefixPool
from cosched.policy.sarathi import SarathiPolicy
from cosched.simulate import main as simulate
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.simulation.scenario import Scenario
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online
from tests.recorded import Recorder, batch_of

SMALL = Machine(kv_tokens=12_000, chunk_tokens=512, max_running_requests=24)


def spec_of(policy, *, overlap):
    return RunSpec(
        scenario=Scenario(
            name=policy, summary="", policy=policy, has_online=True, has_offline=True
        ),
        machine=replace(SMALL, overlap=overlap),
        online=WorkloadSpec(name="alpaca", rate=18.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=1.0, tpot_s=0.02),
        duration_s=5.0,
    )


def read(path):
    """Every decision of a log that must have no bad line."""
    bad = []
    decisions = [entry.decision for entry in read_log(path, report=bad.append)]
    assert bad == []
    return decisions


def planned_again(path, **options):
    return replan(read_log(path, report=pytest.fail), **options)


def changed(path, change, *, where=lambda record: True):
    """Rewrite the records of one file that `where` picks."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if where(record):
            change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module", params=["hygen", "sarathi"])
def policy(request):
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(policy, overlap, tmp_path_factory):
    """(result, log) of a run on the virtual engine."""
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    return execute(spec_of(policy, overlap=overlap), decision_log=path), path


def test_every_recorded_plan_is_made_again(recorded, policy, overlap):
    _, path = recorded
    decisions = read(path)
    replanned = planned_again(path)
    assert replanned.first_difference is None
    assert (replanned.num_equal, replanned.policy) == (len(decisions), policy)
    # The run must have had what makes planning again hard.
    assert len(decisions) > 100
    assert sum(len(decision.plan.preempted) for decision in decisions) >= 2
    dropped = [d for d in decisions if d.result.outcome is Outcome.REPLANNED]
    assert overlap or not dropped, "only with overlap are plans dropped"
    for decision in dropped:
        running = {seq for seq, *_ in decision.view.running}
        stops_running = any(seq in running for seq, _ in decision.plan.preempted)
        assert stops_running or not decision.plan.prefill, "only where it may spare a running one"
    if policy == "hygen":
        assert bool(dropped) == overlap
        assert any(d.plan.preempted and d not in dropped for d in decisions)
        assert any(d.plan.held for d in decisions)
        assert any(d.shapes and d.shapes[0] for d in decisions), "a fitted predictor is in the log"


def test_an_order_that_passes_over_requests_that_begin_alike_is_followed(tmp_path):
    spec = replace(
        spec_of("hygen", overlap=True),
        offline=WorkloadSpec(name="mmlu-like", num_requests=200),
        duration_s=2.0,
    )
    logged = execute(spec, decision_log=tmp_path / "log")
    decisions = read(tmp_path / "log")
    assert planned_again(tmp_path / "log").num_equal == len(decisions) > 50
    assert any(steps_of(d, "skip_sharing") for d in decisions)
    assert any(r.num_prefix_tokens for d in decisions for r in d.requests)
    assert logged.to_dict() == execute(spec).to_dict()


def test_who_was_judged_late_is_in_the_log_and_judged_so_again(tmp_path):
    spec = spec_of("cosched", overlap=True)
    spec = replace(spec, online=WorkloadSpec(name="azure-like", rate=25.0), duration_s=3.0)
    logged = execute(spec, decision_log=tmp_path / "log")
    decisions = read(tmp_path / "log")
    replanned = planned_again(tmp_path / "log")
    assert replanned.first_difference is None
    assert replanned.num_equal == len(decisions) > 50
    judged = [seq for d in decisions for seqs in d.plan.late.values() for seq in seqs]
    assert len(judged) == len(set(judged)) > 5, "each once"
    num_counted = sum(num for num, _ in logged.cosched["late"].values())
    # The last plans of a run are made and not written: nothing came of them.
    assert 0 <= num_counted - len(judged) <= 3
    assert {r.arrival_seq for d in decisions for r in d.requests if r.late} <= set(judged)


def test_candidates_of_buckets_are_followed(tmp_path):
    spec = replace(
        spec_of("echo-bs+e+s", overlap=True),
        offline=WorkloadSpec(name="mmlu-like", num_requests=300),
        duration_s=2.0,
    )
    logged = execute(spec, decision_log=tmp_path / "log")
    decisions = read(tmp_path / "log")
    assert planned_again(tmp_path / "log").num_equal == len(decisions) > 50
    assert any(steps_of(d, "take") and steps_of(d, "skip_sharing") for d in decisions)
    assert any(len(buckets) > 1 for d in decisions for _, buckets in steps_of(d, "candidates"))
    assert logged.to_dict() == execute(spec).to_dict()
    asked = planned_again(tmp_path / "log", policy="hygen")
    assert asked.num_unanswered and asked.num_equal + asked.num_unanswered <= asked.num_plans


def test_wrong_predictions_are_followed(tmp_path):
    spec = spec_of("hygen", overlap=True)
    wrong = replace(spec, config=(("predictor_error", 0.2),))
    result = execute(wrong, decision_log=tmp_path / "log")
    replanned = planned_again(tmp_path / "log")
    assert replanned.num_equal == replanned.num_plans > 100
    assert result.to_dict() == execute(wrong).to_dict(), "equal specifications, equal errors"
    assert result.summary != execute(spec).summary
    errors = {d.calibrator.error for d in read(tmp_path / "log") if d.calibrator}
    assert len(errors) > 100 and min(errors) < 0.8 and max(errors) > 1.2


def test_a_rate_of_admission_is_followed(tmp_path):
    spec = replace(spec_of("hygen-throttled", overlap=False), config=(("offline_rate", 4.0),))
    execute(spec, decision_log=tmp_path / "log")
    replanned = planned_again(tmp_path / "log")
    assert replanned.num_equal == replanned.num_plans > 100
    assert any("rate_limit" in line for line in (tmp_path / "log").open())

    def let_more_in(header):
        header["settings"]["offline_rate"] = 8.0

    changed(tmp_path / "log", let_more_in, where=lambda record: record["kind"] == "header")
    replanned = planned_again(tmp_path / "log")
    assert replanned.num_same_work < replanned.num_plans


def test_the_log_changes_no_result(recorded, policy, overlap):
    logged, _ = recorded
    silent = execute(spec_of(policy, overlap=overlap))
    assert [record_line(r) for r in logged.records] == [record_line(r) for r in silent.records]
    assert logged.to_dict() == silent.to_dict()


def test_measured_times_are_those_of_the_iterations_in_their_order(recorded):
    result, path = recorded
    ran = [d.result for d in read(path) if d.result.outcome is Outcome.RAN]
    rows = list(result.iterations)
    assert 0 <= len(rows) - len(ran) <= 1, "all but the one still under way"
    for one, row in zip(ran, rows, strict=False):
        assert one.measured_s == pytest.approx(row.duration_s)
        assert one.num_decodes == row.num_online_decodes + row.num_offline_decodes


def test_every_finished_request_is_told_once(recorded):
    result, path = recorded
    entries = list(read_log(path, report=pytest.fail))
    ends = [seq for e in entries for seq, *_ in e.decision.result.finished]
    rids = [entries[-1].facts[seq].rid for seq in ends]
    assert len(rids) > 10
    assert sorted(rids) == sorted(r.rid for r in result.records if r.finish_s is not None)


def test_a_changed_budget_is_noticed(tmp_path):
    path = tmp_path / "log"
    execute(spec_of("hygen", overlap=True), decision_log=path)

    def halve(header):
        header["settings"]["latency_budget_s"] = 0.012

    changed(path, halve, where=lambda record: record["kind"] == "header")
    replanned = planned_again(path)
    assert replanned.num_equal < replanned.num_plans
    assert replanned.num_same_work < replanned.num_plans
    assert "limits were" in replanned.first_difference or "prefill" in replanned.first_difference


def test_a_changed_view_is_noticed_in_its_iteration(recorded):
    _, path = recorded
    full = next(d.number for d in read(path) if d.plan.prefill and d.number > 20)
    copy = path.with_name("changed")

    def take_all_slots(record):
        record["view"]["free_slots"] = 0
        record["view"]["kv"]["free"] = record["view"]["kv"]["evictable"] = 0

    copy.write_bytes(path.read_bytes())
    changed(copy, take_all_slots, where=lambda record: record.get("number") == full)
    replanned = planned_again(copy)
    assert replanned.num_plans - replanned.num_equal == 1
    assert replanned.first_difference.startswith(f"iteration {full} at ")


def test_a_changed_calibrator_is_noticed(tmp_path):
    path = tmp_path / "log"
    execute(spec_of("hygen", overlap=False), decision_log=path)

    def slow_down(record):
        record["calibrator"]["drift"] *= 3

    changed(path, slow_down, where=lambda record: "calibrator" in record)
    replanned = planned_again(path)
    assert replanned.num_same_work < replanned.num_plans


def test_another_policy_can_be_asked_about_the_same_views(recorded, policy):
    _, path = recorded
    if policy == "sarathi":
        with pytest.raises(ConfigError, match="a prediction, which was not recorded"):
            planned_again(path, policy="hygen")
        return
    replanned = planned_again(path, policy="sarathi")
    assert replanned.num_equal < replanned.num_plans
    assert replanned.num_same_work > 0


def test_a_policy_that_plans_nothing_cannot_be_asked(tmp_path):
    recorder = Recorder(tmp_path / "log")
    recorder.run(FakeView())
    with pytest.raises(ConfigError, match="'priority' leaves all decisions to SGLang"):
        planned_again(recorder.path, policy="priority")


def view_of(entry):
    return RecordedView(entry, predictor=Linear())


NAMES = {n for n in vars(Request) if not n.startswith("_")}


def steps_of(decision, method):
    """(arguments, answer) of the calls of one method of the offline order."""
    steps = (step for step in decision.view.order if isinstance(step, tuple))
    return [(arguments, answer) for name, arguments, answer in steps if name == method]


class TestWhatIsRecorded:
    def test_of_the_waiting_requests_only_those_the_policy_looked_at(self):
        many = [offline(f"f{i}", 100) for i in range(1000)]
        view = RecordingView(FakeView(online=[online("a")], offline=iter(many)))
        assert [r.rid for r in islice(view.offline_order(), 3)] == ["f0", "f1", "f2"]
        list(view.online)
        list(view.online)
        state = view.state()
        assert [row[0] for row in state.offline] == [r.arrival_seq for r in many[:3]]
        assert state.order == [r.arrival_seq for r in many[:3]] and not state.is_all_offline
        assert len(state.online) == 1 and state.online_is_all

    def test_the_answers_the_policy_got_and_no_others(self):
        asked, silent = offline("asked", 70), offline("silent", 50)
        running = decoding(offline("running", 30, max_new_tokens=9), 4)
        view = RecordingView(FakeView(running=(running,), offline=[asked, silent]))
        view.match(asked)
        view.preemption_gain(running)
        view.reserve_of(running)
        state = view.state()
        assert state.match == {asked.arrival_seq: Match(cached=0, evictable=0)}
        assert state.preemption_gain == {running.arrival_seq: 33}
        assert state.reserve_of == {running.arrival_seq: 5}
        assert state.running == [(running.arrival_seq, 4, 33)]

    def test_a_policy_that_looks_further_is_told_what_is_missing(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        recorder.run(FakeView(offline=[offline(f"f{i}", 500) for i in range(9)]))
        entry = next(iter(read_log(recorder.path, report=pytest.fail)))
        view = view_of(entry)
        looked_at = len(entry.decision.view.offline)
        assert looked_at < 9
        with pytest.raises(NotRecordedError, match=f"offline .* the first {looked_at} that wait"):
            list(view.offline_order())

    def test_who_skips_others_than_were_skipped_is_told_so(self, tmp_path):
        class Order(list):
            """Passes over those with the same number of prompt tokens."""

            knows_prefixes = True

            def order(self):
                return self

            def __iter__(self):
                return self

            def __next__(self):
                if not self:
                    raise StopIteration
                return self.pop(0)

            def skip_sharing(self, request, num_tokens):
                self[:] = [r for r in self if r.num_prompt_tokens != request.num_prompt_tokens]

        class Skipper:
            initial = None

            def plan(self, view, carry):
                order = view.offline_order()
                order.skip_sharing(next(order), 64)
                assert [r.rid for r in order] == ["c"]
                return EMPTY_PLAN, None

        recorder = Recorder(tmp_path / "log", policy=Skipper())
        a = offline("a", 200)
        waiting = Order([a, offline("b", 200), offline("c", 300)])
        recorder.run(FakeView(offline=waiting))
        entry = next(iter(read_log(recorder.path, report=pytest.fail)))
        assert entry.decision.view.order[1] == ("skip_sharing", [a.arrival_seq, 64], None)
        Skipper().plan(view_of(entry), None)
        order = view_of(entry).offline_order()
        with pytest.raises(NotRecordedError, match=r"skip_sharing\(.*, 65\) of the order"):
            order.skip_sharing(next(order), 65)
        with pytest.raises(NotRecordedError, match=r"next offline request before skip_sharing\("):
            list(view_of(entry).offline_order())

    def test_who_takes_others_than_were_taken_is_told_so(self, tmp_path):
        class Taker:
            initial = None

            def plan(self, view, carry):
                order = view.offline_order()
                for rids in (["a", "b"], ["b", "c"]):
                    ((*requests,),) = order.candidates(2)
                    assert [r.rid for r in requests] == rids
                    order.take(requests[0])
                return EMPTY_PLAN, None

        pool = PrefixPool(PoolConfig())
        for rid in "abcd":
            pool.add(offline(rid, 9, token_ids=[ord(rid)] * 9))
        recorder = Recorder(tmp_path / "log", policy=Taker())
        recorder.run(FakeView(offline=pool))
        entry = next(iter(read_log(recorder.path, report=pytest.fail)))
        assert [entry.facts[row[0]].rid for row in entry.decision.view.offline] == ["a", "b", "c"]
        Taker().plan(view_of(entry), None)
        order = view_of(entry).offline_order()
        with pytest.raises(NotRecordedError, match=r"candidates\(3\) of the order"):
            order.candidates(3)
        order = view_of(entry).offline_order()
        ((_, b),) = order.candidates(2)
        with pytest.raises(NotRecordedError, match=r"candidates\(2\) of the order"):
            order.candidates(2)
        with pytest.raises(NotRecordedError, match=r"take\(.* of the order"):
            order.take(b)

    def test_targets_times_and_lengths_come_back(self, tmp_path):
        running = replace(
            decoding(online("r", 40, first_token_s=0.125, max_new_tokens=7), 3),
            last_token_s=0.375,
            num_own_tokens=5,
        )
        late = replace(decoding(offline("l", 9, num_preemptions=2), 2), last_token_s=0.25)
        just_launched = replace(decoding(online("j", 40), 0), num_prefix_tokens=24)
        view = FakeView(
            running=(running, just_launched, late),
            online=[online("w", 60, slo=Slo(ttft_s=0.3), arrival_s=1 / 3)],
            now_s=0.5,
            start_s=0.75,
            mean_iteration_s=0.0625,
            ended=(Ended("gone", RequestClass.OFFLINE, 17),),
            unholdable={"j"},
        )
        recorder = Recorder(tmp_path / "log")
        recorder.run(view)
        again = view_of(next(iter(read_log(recorder.path, report=pytest.fail))))
        assert (again.now_s, again.start_s, again.kv) == (0.5, 0.75, view.kv)
        assert again.mean_iteration_s == 0.0625
        assert tuple(again.ended) == view.ended
        for mine, theirs in zip(
            [*view.running, *view.online], [*again.running, *again.online], strict=True
        ):
            assert all(getattr(mine, n) == getattr(theirs, n) for n in NAMES)
        assert again.running[1].num_prefix_tokens == 24

    def test_a_first_token_is_known_from_when_it_came(self, tmp_path):
        waiting = online("r", 40)
        running = replace(decoding(waiting), first_token_s=0.5)
        recorder = Recorder(tmp_path / "log")
        recorder.run(FakeView(online=[waiting]))
        recorder.run(FakeView(running=(running,)))
        recorder.run(FakeView(running=(replace(running, num_output_tokens=2),)))
        views = [view_of(e) for e in read_log(recorder.path, report=pytest.fail)]
        assert [r.first_token_s for v in views for r in (*v.online, *v.running)] == [None, 0.5, 0.5]
        named = [[facts.first_token_s for facts in d.requests] for d in read(recorder.path)]
        assert named == [[None], [0.5], []]

    def test_every_member_of_a_view_can_be_asked_again(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        recorder.run(FakeView())
        view = view_of(next(iter(read_log(recorder.path, report=pytest.fail))))
        for name in vars(View):
            assert name.startswith("_") or hasattr(view, name), name
        assert view.eviction_loss_s(0) == 0.0
        with pytest.raises(NotRecordedError, match="`eviction_loss_s` of 7"):
            view.eviction_loss_s(7)


class Always:
    """A policy that gives one plan."""

    initial = None

    def __init__(self, plan):
        self.given = plan

    def plan(self, view, carry):
        list(view.online)
        return self.given, None


class TestWhatBecameOfAPlan:
    def test_plans_are_written_in_their_order_when_their_results_are_known(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        first, second = decoding(online("a")), decoding(online("b"))
        recorder.plan(FakeView(running=(first,)))
        under_way = recorder.launch(batch_of(first))
        recorder.plan(FakeView(running=(second,)))
        recorder.launch(None)  # over before the one under way is
        assert read(recorder.path) == []
        recorder.end(under_way, batch_of(first), start_s=1.0, seconds=0.02)
        told = read(recorder.path)
        assert [d.number for d in told] == [0, 1]
        assert [d.result.outcome for d in told] == [Outcome.RAN, Outcome.NO_BATCH]
        assert (told[0].result.start_s, told[0].result.measured_s) == (1.0, 0.02)
        assert told[1].result.measured_s is None

    def test_a_plan_made_again_is_marked(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        running = decoding(online("a"))
        recorder.plan(FakeView(running=(running,)))
        recorder.run(FakeView(running=(running,)), running)
        outcomes = [d.result.outcome for d in read(recorder.path)]
        assert outcomes == [Outcome.REPLANNED, Outcome.RAN]

    def test_what_the_engine_refused_is_named(self, tmp_path):
        taken, refused = online("taken", 10), online("refused", 10)
        recorder = Recorder(
            tmp_path / "log", policy=Always(Plan(prefill={"taken": 10, "refused": 10}))
        )
        recorder.run(FakeView(online=[taken, refused]), taken)
        assert read(recorder.path)[0].result.refused == [refused.arrival_seq]

    def test_a_request_that_ends_with_the_next_iteration_on_its_way_is_told_once(self, tmp_path):
        request = decoding(online("a"), 6)
        recorder = Recorder(tmp_path / "log")
        under_way = []
        for _ in range(2):
            recorder.plan(FakeView(running=(request,)))
            under_way.append(recorder.launch(batch_of(request)))
        for iteration in under_way:
            recorder.end(iteration, batch_of(request, finishing=("a",)), start_s=0.0)
        finished = [d.result.finished for d in read(recorder.path)]
        assert finished == [[(request.arrival_seq, "length", 6)], []]

    def test_a_batch_without_a_plan_is_nobodys(self, tmp_path):
        recorder = Recorder(tmp_path / "log", policy=Always(EMPTY_PLAN))
        recorder.log.launched(Iteration(), None)
        recorder.end(Iteration(), batch_of(), start_s=0.0)
        assert read(recorder.path) == []


class TestParts:
    def fill(self, path, num=400):
        recorder = Recorder(path, max_bytes=40_000)
        running = decoding(online("long-lived", 40, first_token_s=0.25), 3)
        for i in range(num):
            view = FakeView(running=(running,), offline=[offline(f"f{i}", 700)], now_s=float(i))
            recorder.run(view, running)
        return parts_of(path)

    def test_old_parts_go_and_the_rest_is_read_in_order(self, tmp_path):
        parts = self.fill(tmp_path / "log")
        assert len(parts) == NUM_PARTS
        assert sum(part.stat().st_size for part in parts) < 44_000
        numbers = [d.number for d in read(tmp_path / "log")]
        assert numbers[0] > 0
        assert numbers == list(range(numbers[0], 400))

    def test_each_part_can_be_read_and_planned_alone(self, tmp_path):
        for part in self.fill(tmp_path / "log"):
            alone = tmp_path / "alone"
            alone.write_bytes(part.read_bytes())
            replanned = planned_again(alone)
            assert replanned.num_equal == replanned.num_plans > 0
            entry = next(iter(read_log(alone, report=pytest.fail)))
            assert view_of(entry).running[0].first_token_s == 0.25

    def test_a_new_log_does_not_mix_with_an_older_one(self, tmp_path):
        (tmp_path / "log-book").write_text("mine")
        old = [part.read_bytes() for part in self.fill(tmp_path / "log")]
        recorder = Recorder(tmp_path / "log")
        recorder.run(FakeView())
        assert parts_of(tmp_path / "log") == [tmp_path / "log"]
        assert [d.number for d in read(tmp_path / "log")] == [0]
        kept = [part.read_bytes() for part in sorted(tmp_path.glob("log-0*"))]
        assert len(kept) == NUM_PARTS and kept == old
        assert read(sorted(tmp_path.glob("log-0*"))[-1])[-1].number == 399
        assert (tmp_path / "log-book").read_text() == "mine"

    def test_restarts_keep_within_the_size(self, tmp_path):
        for _ in range(3):
            self.fill(tmp_path / "log", num=150)
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 54_000
        for _ in range(100):  # a server that does not get up
            Recorder(tmp_path / "log", max_bytes=40_000).run(FakeView())
        assert len(list(tmp_path.iterdir())) < 70
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 54_000

    def test_a_device_is_written_as_it_is(self):
        recorder = Recorder(Path("/dev/null"), max_bytes=100)
        for _ in range(5):
            recorder.run(FakeView())
        assert Path("/dev/null").is_char_device() and not list(Path("/dev").glob("null-0*"))

    def test_a_folder_that_is_not_there_is_one_sentence(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot write the log .*absent"):
            Recorder(tmp_path / "absent" / "log")


def test_a_line_holds_only_what_differs_from_nothing(tmp_path):
    recorder = Recorder(tmp_path / "log")
    recorder.run(FakeView())
    header, line = (tmp_path / "log").read_bytes().splitlines()
    assert msgspec.json.decode(header, type=Header).policy == "sarathi"
    assert msgspec.json.decode(line, type=Decision).plan.prefill == []
    record = json.loads(line)
    assert record["plan"] == {} and "requests" not in record and "running" not in record["view"]


def test_the_log_needs_a_policy_that_decides():
    with pytest.raises(ConfigError, match="decision_log: policy 'priority' leaves all decisions"):
        parse_config('{"policy": "priority", "decision_log": "x"}', source="test")
    with pytest.raises(ConfigError, match="decision_log_mb must be a positive number"):
        parse_config('{"decision_log_mb": 0}', source="test")
    assert Config().decision_log is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "sglang"], "policy 'sglang' leaves all decisions to SGLang"),
        (["--policy", "sarathi", "--find", "kv"], "--find makes many"),
    ],
)
def test_simulations_that_cannot_be_recorded_are_refused(arguments, message, tmp_path, capsys):
    from cosched.simulation.find import QUESTIONS

    if "--find" in arguments:
        arguments = [*arguments[:-1], sorted(QUESTIONS)[0]]
    log = ["--decision-log", str(tmp_path / "log")]
    with pytest.raises(SystemExit) as stop:
        simulate(["--online", "alpaca", "--online-rate", "1", "--duration", "1", *log, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_log_nothing_is_watched(make_engine):
    assert make_engine(policy="sarathi").scheduler.cosched.decisions is None


def test_plans_pass_through_the_recording_view_unchanged():
    caps = make_caps(partial_decode=True)
    view = FakeView(
        caps=caps,
        running=(decoding(offline("o", 400)), decoding(online("r", 30))),
        online=[online("n", 200)],
        offline=[offline("w", 700)],
    )
    policy = SarathiPolicy()
    plan, _ = policy.plan(view, None)
    assert policy.plan(RecordingView(view), None) == (plan, None)
    assert plan != EMPTY_PLAN
