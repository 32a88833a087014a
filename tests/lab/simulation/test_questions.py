"""Commands that answer a question by simulations: searches, capacities, estimates."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched import simulate
from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError
from cosched.lab.estimate import main as estimate
from cosched.lab.estimate import part_of_chats, part_of_lines, read_lines
from cosched.lab.metrics.goals import parse_goal
from cosched.lab.simulation import virtual
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched.lab.simulation.search import (
    CAPACITIES,
    PARAMETERS,
    largest_good,
    last_good,
    search,
    values_between,
)
from cosched_traces.workload import TraceRequest
from tests.batch.api import line
from tests.simulated import fork_here, make_spec, stay_in_process

AT_ONCE = st.integers(1, 4)

# -- searching for a boundary ---------------------------------------------------------------------


@given(
    low=st.floats(0.01, 100),
    ratio=st.floats(1, 1000),
    tolerance=st.sampled_from([0.01, 0.1, 0.5]),
    is_integer=st.booleans(),
)
def test_a_range_becomes_values_no_further_apart_than_the_tolerance(
    low, ratio, tolerance, is_integer
):
    high = low * ratio
    if is_integer:
        low, high = float(round(low) + 1), float(round(high) + 1)
    values = values_between(low, max(low, high), tolerance=tolerance, is_integer=is_integer)
    assert values[0] == low and values[-1] == max(low, high)
    assert values == sorted(set(values))
    for one, other in pairwise(values):
        assert other - one <= max(tolerance * one * 1.001, 1.0 if is_integer else 0.0)
        assert not is_integer or other == int(other)


@given(count=st.integers(1, 200), data=st.data(), at_once=AT_ONCE)
def test_the_boundary_is_found_and_no_value_in_the_middle_is_tried_twice(count, data, at_once):
    num_good = data.draw(st.integers(0, count))
    tried = []

    def probe(values):
        assert 1 <= len(values) <= max(at_once, 2)
        tried.extend(values)
        return [value < num_good for value in values]

    found = last_good(range(count), probe, num_at_once=at_once)
    assert found == (num_good - 1 if num_good else None)
    assert len(tried) == len(set(tried)) <= 2 + at_once * 8


@given(bounds=st.tuples(st.integers(0, 99), st.integers(0, 99)), at_once=AT_ONCE)
def test_values_that_are_too_small_do_not_hide_the_good_ones(bounds, at_once):
    low, high = sorted(bounds)
    tried = []

    def probe(values):
        tried.extend(values)
        return [low <= value <= high for value in values]

    found = largest_good(range(100), probe, num_at_once=at_once)
    assert len(tried) == len(set(tried)) < 30
    if found is None:
        assert high - low < 13, "it fell between two that were scanned"
    else:
        assert found == high


# -- the largest value that meets all goals -------------------------------------------------------

SPEC = make_spec("hygen", duration_s=3.0)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"low": 5.0, "high": 4.0}, "the range is 5 to 4"),
        ({}, {"low": 5.0, "high": 5.0}, "the range is 5 to 5"),
        ({}, {"tolerance": 1.5}, r"tolerance is 1\.5"),
        ({}, {"goals": []}, "name at least one --slo"),
        ({"config": (("latency_budget_mss", 3),)}, {}, "latency_budget_mss"),
    ],
)
def test_bad_searches_are_refused_before_anything_runs(changes, arguments, message):
    goals = {"goals": [parse_goal("p99_ttft<=1s")]}
    with pytest.raises(ConfigError, match=message):
        search(PARAMETERS["budget"], replace(SPEC, **changes), **{**goals, **arguments})
    assert set(PARAMETERS) == {"budget", "offline-rate"}


def test_a_real_search_meets_its_goals_and_the_next_value_does_not(monkeypatch):
    stay_in_process(monkeypatch)
    goals = [parse_goal("p99_tbt<=25ms"), parse_goal("p99_ttft<=2s"), parse_goal("mean_tbt<=+900%")]
    ran = []
    answer = search(
        PARAMETERS["budget"],
        SPEC,
        goals,
        low=10.0,
        high=80.0,
        tolerance=0.6,
        on_run=lambda what, _: ran.append(what),
    )
    assert answer.value is not None
    assert ran[0] == "online requests alone" and len(ran) == len(answer.probes) + 1
    assert answer.bounds[:2] == (0.025, 2.0)
    assert answer.bounds[2] == pytest.approx(10 * answer.baseline[2])
    by_value = {probe.value: probe for probe in answer.probes}
    assert by_value[answer.value].is_good
    assert all(r <= b for r, b in zip(by_value[answer.value].reached, answer.bounds, strict=True))
    above = min(value for value in by_value if value > answer.value)
    assert not by_value[above].is_good and above <= answer.value * 1.601


# -- capacity -------------------------------------------------------------------------------------

GOALS = [parse_goal("attainment>=90%")]


def test_the_command_answers_in_a_sentence(monkeypatch, capsys):
    stay_in_process(monkeypatch)
    load = ["--online", "alpaca", "--online-rate", "64", "--duration", "1", "--slo-ttft", "1"]
    limits = ["--max-running-requests", "16", "--attainment", "0.0000001", "--tolerance", "0.9"]
    question = ["--policy", "sglang", "--find", "max-online-rate"]
    simulate.main([*question, *load, *limits, "--quiet"])
    sentence, *_, line = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert sentence == f"max-online-rate: {answer['value']:g} req/s (attainment of at least 0%)"
    assert answer["bounds"] == [4.0, 1024.0] and answer["attainment"] == 1e-7
    assert {probe["value"] for probe in answer["probes"]} >= {answer["value"]}


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_an_attainment_beyond_all_requests_is_refused(share, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate.main(["--find", "min-kv", "--online", "alpaca", "--attainment", share])
    assert "--attainment" in capsys.readouterr().err


def test_a_question_without_what_it_is_about_is_refused():
    with pytest.raises(ConfigError, match="name --online"):
        search(CAPACITIES["max-online-rate"], make_spec("s0", online=None), GOALS)


def test_a_question_is_answered_by_simulations(monkeypatch):
    """The answer was simulated and is good; just above it, within the tolerance, it is not."""
    ran = stay_in_process(monkeypatch)
    spec = make_spec(
        "s0",
        machine={"max_running_requests": 16},
        online=WorkloadSpec(name="alpaca", rate=16.0),
        offline=None,
        slo=Slo(ttft_s=0.3, tpot_s=0.05),
        duration_s=2.0,
    )
    answer = search(CAPACITIES["max-online-rate"], spec, GOALS, tolerance=0.9)
    tried = {probe.value: probe.reached[0] for probe in answer.probes}
    assert {one.online.rate for one in ran} == set(tried)
    assert (answer.low, answer.high) == (1.0, 256.0)
    assert answer.value is not None and tried[answer.value] >= 0.9
    above = min(value for value in tried if value > answer.value)
    assert tried[above] < 0.9
    assert above - answer.value <= 0.9 * answer.value


def test_a_capacity_that_refuses_the_whole_offline_set_is_not_enough(monkeypatch):
    """Such a run is over at once, with all of its few online requests in time."""

    def execute(specs, *, num_jobs):
        for index, spec in enumerate(specs):
            num_failed = 5 if spec.machine.kv_tokens < 10_000 else 0
            offline = SimpleNamespace(num_requests=5, num_failed=num_failed, tokens_per_s=0.0)
            met = SimpleNamespace(joint=SimpleNamespace(ratio=1.0))
            online = SimpleNamespace(attainment=met)
            summary = SimpleNamespace(online=online, offline=offline)
            yield index, SimpleNamespace(summary=summary, records=())

    monkeypatch.setattr("cosched.lab.simulation.search.execute_all", execute)
    spec = make_spec("s0", machine={"kv_tokens": 40_000})
    answer = search(CAPACITIES["min-kv"], spec, GOALS)
    assert answer.value is not None and 10_000 <= answer.value <= 10_500


# -- when a file will be finished -----------------------------------------------------------------


def write(path, num, *, max_tokens=8):
    with path.open("w") as file:
        for number in range(num):
            prompt = f"document {number % 4} " * 50 + f"question {number}"
            body = {"prompt": prompt, "max_tokens": max_tokens}
            file.write(json.dumps(line(f"c{number}", body=body)) + "\n")
    return path


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_estimate_says_when_the_file_is_finished_and_how_often_it_is_not(
    tmp_path, capsys, monkeypatch, forked
):
    """forked: not by the fork server, which imports SGLang first."""
    if forked:
        fork_here(monkeypatch)

    def ask(path, *options):
        common = ("--trace", "azure-like", "--cost-model", "roofline", "--rate", "0.3", "--quiet")
        machine = ("--kv-tokens", "20000", "--max-running-requests", "32")
        estimate([str(path), *common, *machine, "--window", "1m", *options])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    path = write(tmp_path / "in.jsonl", 24)
    told = ask(path, "--starts", "2")
    assert told["lines"] == 24 and told["output_tokens"] == 192
    assert [one["finished"] for one in told["starts"]] == [24, 24]
    assert told["starts"][0]["start_s"] == 0 < told["starts"][1]["start_s"]
    assert told["miss_chance"] == 0 and 0 < told["earliest_finish_s"] <= told["latest_finish_s"]
    # One line at a time takes longer, and a window that is too short ends first.
    alone = ("--concurrency", "1", "--starts", "1")
    slow = ask(path, *alone)
    assert slow["earliest_finish_s"] > told["latest_finish_s"]
    half = ask(path, *alone, "--replicas", "2")
    assert half["lines"] == 24 and half["starts"][0]["finished"] == 12
    assert half["latest_finish_s"] < slow["latest_finish_s"]
    assert half["starts"][0]["saturation"] is None, "the run is too short to tell"
    slow_gpu = ("--slower", "4", "--slower-after", "0")
    missed = ask(write(tmp_path / "long.jsonl", 24, max_tokens=200), *alone, *slow_gpu)
    assert missed["miss_chance"] == 1 and missed["latest_finish_s"] is None
    assert 0 < missed["starts"][0]["finished"] < 24


def test_replicas_share_chats_by_conversation_and_the_file_in_its_order(tmp_path):
    chats = [
        TraceRequest(
            rid=f"{session}-{turn}",
            request_class=RequestClass.ONLINE,
            arrival_s=0.0,
            num_output_tokens=1,
            session=session,
        )
        for session in map(str, range(40))
        for turn in range(3)
    ]
    mine = part_of_chats(chats, 2)
    assert part_of_chats(chats, 1) == chats and 30 < len(mine) < 90
    assert {Counter(one.session for one in mine)[one.session] for one in mine} == {3}
    lines = read_lines(write(tmp_path / "in.jsonl", 41))
    assert part_of_lines(lines, 1) == lines
    assert part_of_lines(lines, 2) == lines[:21]


def test_lines_are_read_in_prefix_order_with_replies_within_their_limit(tmp_path):
    path = write(tmp_path / "in.jsonl", 40)
    requests = read_lines(path, reply_tokens=5)
    heads = [request.token_ids[:100] for request in requests]
    assert sum(a != b for a, b in itertools.pairwise(heads)) == 3
    assert {request.num_output_tokens for request in requests} == {5}
    assert {request.max_new_tokens for request in requests} == {8}
    assert read_lines(path, reply_tokens=50)[0].num_output_tokens == 8


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", (), "the file has no lines"),
        ("{}", (), "custom_id is not a text"),
        ('{"custom_id": "a"}', ("--window", "1 day"), "must be a number and m, h or d"),
    ],
)
def test_a_wrong_file_or_window_is_reported_in_one_sentence(
    tmp_path, capsys, content, options, message
):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        estimate([str(path), "--trace", "azure-like", *options])
    assert message in capsys.readouterr().err


# -- `cosched simulate` ---------------------------------------------------------------------------

DOCUMENTS = ("--offline", "documents", "--offline-requests", "4", "--quiet")
SMALL = ("--max-running-requests", "32")


def test_a_run_that_ends_early_says_why(capsys):
    simulate.main([*DOCUMENTS, *SMALL, "--duration", "60"])
    shown = capsys.readouterr()
    assert " of 60 s: all 4 offline requests were finished" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["end_s"] < 60
    simulate.main([*DOCUMENTS, *SMALL, "--duration", "0.2"])
    assert "It ended at" not in capsys.readouterr().err


def test_requests_under_way_that_exceed_the_memory_end_the_run_in_one_sentence(capsys, monkeypatch):
    free = SimpleNamespace(available=100_000)
    monkeypatch.setattr(virtual, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    with pytest.raises(SystemExit, match="2"):
        simulate.main([*DOCUMENTS, "--duration", "60"])
    shown = capsys.readouterr().err
    assert shown.startswith("cosched: ") and shown.count("\n") == 1
    assert "this machine's memory holds 2,666 tokens" in shown
