"""The compact sets behave as Python's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosched.batch.jsonl.ids import IdSet, LineSet


@given(st.lists(st.text(max_size=3), max_size=200))
def test_an_id_is_new_exactly_once(texts):
    ids, seen = IdSet(max_ids=len(texts)), set()
    for text in texts:
        assert ids.add(text) == (text not in seen)
        seen.add(text)
        assert len(ids) == len(seen)


@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_line_numbers_are_kept_apart(case):
    num_lines, numbers = case
    lines = LineSet(num_lines=num_lines)
    for number in numbers:
        lines.add(number)
    assert {n for n in range(1, num_lines + 1) if n in lines} == numbers


def test_a_full_set_still_finds_and_refuses_nothing_wrong():
    ids = IdSet(max_ids=10_000)
    names = [f"request-{n}" for n in range(10_000)]
    assert all(ids.add(name) for name in names)
    assert not any(ids.add(name) for name in names)
