"""Segments give the same tokens everywhere, and prefixes of each other."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_traces.seeds import KEYS, key_base, rng_of
from cosched_traces.trace_summary import shared_ratio
from tests.traces.samples import request, workload


@given(key=st.integers(0, KEYS - 1), long=st.integers(1, 700), vocab=st.integers(20, 200_000))
def test_a_shorter_segment_is_a_prefix_of_a_longer(key, long, vocab):
    whole = request(prompt=((key, long),)).prompt(vocab_size=vocab)
    part = request(prompt=((key, long // 2),)).prompt(vocab_size=vocab)
    assert whole[: len(part)] == part
    assert all(10 <= token < vocab for token in whole)


def test_requests_must_be_in_order():
    with pytest.raises(AssertionError, match="not in the order of arrival"):
        workload(request("a", 1.0), request("b", 0.0))


def test_keys_and_seeds_are_the_same_in_every_process():
    code = (
        "from cosched_traces.seeds import key_base, rng_of;"
        "print(key_base('a', 1), rng_of(3, 'b').integers(10**9))"
    )
    # String hashes differ from process to process; keys and draws may not.
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{key_base('a', 1)} {rng_of(3, 'b').integers(10**9)}\n"}


def test_sharing_follows_prompts_from_the_start():
    prompts = [
        ((1, 10), (2, 10)),
        ((9, 10), (2, 10)),  # another start: nothing shared
        ((1, 6),),  # a prefix of a segment
        ((1, 10), (2, 10), (3, 10)),
    ]
    made = workload(*(request(str(i), prompt=p) for i, p in enumerate(prompts)))
    assert shared_ratio(made) == pytest.approx((6 + 20) / 76)


def test_sharing_of_given_tokens():
    ids = tuple(range(64))
    made = workload(request("a", token_ids=ids), request("b", token_ids=(*ids[:40], 99)))
    assert shared_ratio(made) == pytest.approx(32 / 105)
