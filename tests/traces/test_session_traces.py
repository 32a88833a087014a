"""Recorded sessions: what a later prompt shares with earlier ones, and with other sessions."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched_traces.catalogue import load_workload
from cosched_traces.errors import RowError
from cosched_traces.session_traces import read_sessions_jsonl
from tests.traces.samples import common_prefix, request, write, write_jsonl

VOCAB = 50_000
BLOCK = 64


def turn(num_tokens, ids, *, out=9, think_s=5.0, **fields):
    return {"in": num_tokens, "out": out, "hash_ids": ids, "think_time": think_s, **fields}


def row(*requests, name="a", tool=0, system=0, **fields):
    return {
        "id": name,
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": tool,
        "system_tokens": system,
        "requests": list(requests),
        **fields,
    }


def read(tmp_path, *rows):
    return read_sessions_jsonl(write_jsonl(tmp_path / "s.jsonl", *rows))


def prompts(session):
    return [
        request(prompt=turn.segments).prompt(vocab_size=VOCAB) if turn.segments else []
        for turn in session.turns
    ]


@st.composite
def sessions(draw):
    """Requests whose prompts go on from a prefix of an earlier one; ids are prefix ids."""
    known, fresh, requests = [()], iter(range(1, 1000)), []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(known))
        kept = base[: draw(st.integers(0, len(base)))]
        ids = (*kept, *(next(fresh) for _ in range(draw(st.integers(0, 4)))))
        known.append(ids)
        requests.append((ids, draw(st.integers(0 if ids else 1, BLOCK - 1))))
    return requests


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=sessions(), num_head_blocks=st.integers(0, 5))
def test_equal_leading_ids_are_equal_tokens(tmp_path, requests, num_head_blocks):
    turns = [turn(BLOCK * len(ids) + tail, list(ids)) for ids, tail in requests]
    (session,) = read(tmp_path, row(*turns, tool=num_head_blocks * BLOCK)).sessions
    made = prompts(session)
    assert [len(prompt) for prompt in made] == [t["in"] for t in turns]
    for (ids, _), prompt in zip(requests, made, strict=True):
        for (other_ids, _), other in zip(requests, made, strict=True):
            same = common_prefix(prompt, other)
            blocks = common_prefix(ids, other_ids)
            assert blocks * BLOCK <= same
            if blocks < min(len(ids), len(other_ids)):
                assert same == blocks * BLOCK
    for index in range(1, len(requests)):
        (ids, tail), (later_ids, later_tail) = requests[index - 1], requests[index]
        goes_on = later_ids[: len(ids)] == ids and (len(later_ids) > len(ids) or later_tail >= tail)
        if goes_on:
            assert common_prefix(made[index - 1], made[index]) == len(made[index - 1])


class TestHeads:
    """Whole blocks of tools and system prompt, shared between sessions."""

    def rows(self):
        return [
            row(turn(300, [1, 2, 3, 4]), name=name, tool=tool, system=30)
            for name, tool in (("a", 120), ("b", 120), ("c", 200))
        ]

    def test_are_shared_where_they_are_as_long(self, tmp_path):
        a, b, c = (prompts(s)[0] for s in read(tmp_path, *self.rows()).sessions)
        assert (common_prefix(a, b), common_prefix(a, c)) == (2 * BLOCK, 0)

    def test_stay_when_a_session_comes_again_and_the_rest_does_not(self, tmp_path):
        (session,) = read(tmp_path, self.rows()[0]).sessions
        again = session.again(1)
        assert again.name != session.name
        assert common_prefix(prompts(session)[0], prompts(again)[0]) == 2 * BLOCK


def test_sub_agents_are_left_out_and_counted_and_long_think_times_cut(tmp_path):
    agent = {"type": "subagent", "requests": []}
    given = row(turn(70, [1], think_s=0), agent, turn(140, [1, 2], think_s=71_884))
    made = read(tmp_path, given)
    assert [t.think_s for t in made.sessions[0].turns] == [0, 60]
    assert "left out 1 entries of sub-agents" in made.notes


def test_a_file_is_a_workload_by_its_path(tmp_path):
    path = write_jsonl(
        tmp_path / "mine.jsonl.gz", row(turn(70, [1]), turn(140, [1, 2]), name="x", tool=64)
    )
    made = load_workload(str(path), seed=0, num_sessions=2, duration_s=30)
    assert {r.session.split("/")[0] for r in made.requests} == {"mine-x"}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(turn(130, [1])), "1 hash_ids for 130 tokens make no 2 full blocks"),
        (row(turn(130, [1, -2])), "`int` >= 0 - at `$.hash_ids[1]`"),
        (row(turn(0, [])), "`int` >= 1 - at `$.in`: {'in': 0"),
        (row(turn(70, [1], out=0)), "`int` >= 1 - at `$.out`"),
        (row(turn(70, [1], think_s=-1)), "`float` >= 0.0 - at `$.think_time`"),
        (row(turn(70, [1], think_s=None)), "`float`, got `null` - at `$.think_time`"),
        (row(turn(70, [1], out="9")), "`int`, got `str` - at `$.out`"),
        (row(), "the session has no requests of its own"),
        (row(turn(70, [1]), requests=5), "`array`, got `int` - at `$.requests`"),
        (row(turn(70, [1]), tool=-1), "`int` >= 0 - at `$.tool_tokens`"),
        (row(turn(70, [1]), block_size=0), "`int` >= 1 - at `$.block_size`"),
        (
            row(turn(130, [1, 2]), turn(130, [2, 1])),
            "an id of hash_ids follows another id than it did before",
        ),
        (row(turn(130, [1, 1])), "an id of hash_ids follows another id than it did before"),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, bad, reason):
    good = row(turn(70, [1]))
    path = write(tmp_path / "bad.jsonl", json.dumps(good), "", json.dumps(bad))
    with pytest.raises(RowError, match=r"bad.jsonl:3: ") as error:
        read_sessions_jsonl(path)
    assert reason in str(error.value)
