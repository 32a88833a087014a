"""Hash ids become prefixes that prompts really share."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched_traces.block_traces import read_mooncake_jsonl, read_servegen_batch_jsonl
from cosched_traces.errors import RowError
from cosched_traces.lengths import Fixed, Uniform
from cosched_traces.rows import OnEmpty, ReadOptions
from tests.traces.samples import common_prefix, lengths_of, write, write_jsonl

VOCAB = 50_000


def mooncake(timestamp, input_length, hash_ids, output_length=7):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def prompts(workload):
    return [request.prompt(vocab_size=VOCAB) for request in workload.requests]


def test_mooncake_rows_share_their_leading_blocks(tmp_path):
    path = write_jsonl(
        tmp_path / "m.jsonl.gz",
        mooncake(0, 1500, [0, 1, 2]),
        mooncake(40, 1100, [0, 1, 9]),
        mooncake(1000, 600, [5, 1]),
    )
    read = read_mooncake_jsonl(path)
    assert [r.arrival_s for r in read.requests] == [0, 0.04, 1]
    assert lengths_of(read) == [(1500, 7), (1100, 7), (600, 7)]
    first, second, third = prompts(read)
    assert [len(first), len(second), len(third)] == [1500, 1100, 600]
    assert common_prefix(first, second) == 1024
    assert common_prefix(first, third) == 0


def test_a_shorter_last_block_is_a_prefix_of_the_whole_one(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", mooncake(0, 700, [3, 4]), mooncake(1, 1024, [3, 4]))
    short, whole = prompts(read_mooncake_jsonl(path))
    assert common_prefix(short, whole) == 700


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 512)),
        min_size=2,
        max_size=6,
    )
)
def test_shared_leading_ids_are_shared_tokens(tmp_path, paths):
    rows = [mooncake(0, 512 * (len(ids) - 1) + last, ids) for ids, last in paths]
    workload = read_mooncake_jsonl(write_jsonl(tmp_path / "m.jsonl", *rows))
    made = prompts(workload)
    for (ids, last), prompt in zip(paths, made, strict=True):
        for (other_ids, other_last), other in zip(paths, made, strict=True):
            blocks = common_prefix(ids, other_ids)
            expected = 512 * blocks
            # The last common block may be cut short in one prompt or in both.
            if blocks == len(ids):
                expected += last - 512
            if blocks == len(other_ids):
                expected = min(expected, 512 * (blocks - 1) + other_last)
            assert common_prefix(prompt, other) == expected


def test_files_of_other_names_share_nothing(tmp_path):
    row = mooncake(0, 1024, [0, 1])
    one = read_mooncake_jsonl(write_jsonl(tmp_path / "one.jsonl", row))
    other = read_mooncake_jsonl(write_jsonl(tmp_path / "other.jsonl", row))
    assert common_prefix(prompts(one)[0], prompts(other)[0]) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated: {"),
        ("[1]", "`object`, got `array`: [1]"),
        ('{"timestamp": 0}', "missing required field `input_length`"),
        ('{"timestamp": "0", "input_length": 5}', "`float`, got `str` - at `$.timestamp`"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 513 tokens; blocks of 512 tokens make 2",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
            "`int`, got `str` - at `$.hash_ids[0]`",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}',
            "output tokens is 0",
        ),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, line, reason):
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}'
    path = write(tmp_path / "bad.jsonl", good, "", line)
    with pytest.raises(RowError, match=r"bad.jsonl:3: ") as error:
        read_mooncake_jsonl(path)
    assert reason in str(error.value)


def test_an_empty_prompt_without_blocks_can_be_clamped(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", mooncake(0, 0, []))
    read = read_mooncake_jsonl(path, ReadOptions(on_empty=OnEmpty.CLAMP))
    assert lengths_of(read) == [(1, 7)]


def test_servegen_content_traces_share_blocks_of_16(tmp_path):
    rows = [
        {"request_id": i, "type": "text", "input_length": 40, "hash_ids": ids, "img_ids": []}
        for i, ids in enumerate([[0, 1, 2], [0, 1, 3]])
    ]
    path = write_jsonl(tmp_path / "trace_a.jsonl", *rows)
    with pytest.raises(RowError, match=r"trace_a.jsonl:1: no output_length.*give output="):
        read_servegen_batch_jsonl(path)
    read = read_servegen_batch_jsonl(path, output=Fixed(9))
    assert lengths_of(read) == [(40, 9), (40, 9)]
    assert common_prefix(*prompts(read)) == 32
    drawn = [read_servegen_batch_jsonl(path, output=Uniform(1, 99), seed=s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_servegen_length_traces(tmp_path):
    row = {"request_id": 0, "input_length": 61, "output_length": 2370, "duration": 14000}
    read = read_servegen_batch_jsonl(write_jsonl(tmp_path / "trace_d.jsonl", row))
    assert lengths_of(read) == [(61, 2370)]
