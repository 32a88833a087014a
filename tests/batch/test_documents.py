"""Which lines of several batches are next."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from cosched.batch.documents import MOST_ABOUT_ONE, TO_A_BORDER, Claim, Part, Queue, choose
from cosched.batch.jsonl.prefix_order import CHUNK_DIGEST_BYTES
from tests.batch.test_store import new_line


def key(document, *rest):
    """Of a prompt with three chunks of a document, and further ones."""
    chunks = (document, document, document, *rest)
    return b"".join(chunk.to_bytes(CHUNK_DIGEST_BYTES, "big") for chunk in chunks)


def queue(name, keys, *, num_here=0, due=math.inf, num_known=None):
    """Of a batch; beyond the first `num_known` lines it must look them up."""
    lines = [new_line(n, one) for n, one in enumerate(sorted(keys))]
    known = lines[:num_known]
    is_whole = len(known) == len(lines)
    return Queue(
        Part(batch_id=name, most=10**6, num_here=num_here, due=due),
        known,
        complete=(b"", None if is_whole else known[-1].prefix_key),
        look_up=lambda stem: [line for line in lines if line.prefix_key.startswith(stem)],
    )


def chosen(queues, *, limit, num_ahead=0, begun=()):
    """(batch, document) of each line."""
    claim = Claim(parts=tuple(one.part for one in queues), limit=limit, num_ahead=num_ahead)
    found = choose(claim, queues, begun=begun)
    return [
        (of.part.batch_id, int.from_bytes(line.prefix_key[:CHUNK_DIGEST_BYTES], "big"))
        for of, line in found
    ]


@pytest.mark.parametrize("num_known", [None, 12])
def test_a_batch_with_few_lines_on_each_document_does_not_run_ahead(num_known):
    many = queue("many", [key(n % 30, n) for n in range(300)], num_known=num_known)
    few = queue("few", [key(n, 999) for n in range(30)])
    found = chosen([many, few], limit=110)
    assert Counter(found) == {("many", n): 10 for n in range(10)} | {
        ("few", n): 1 for n in range(10)
    }


def test_a_batch_on_other_documents_gets_its_half():
    large = queue("large", [key(n // 10, n) for n in range(300)])
    small = queue("small", [key(1000 + n // 10, n) for n in range(60)])
    assert Counter(name for name, _ in chosen([large, small], limit=80)) == {
        "large": 40,
        "small": 40,
    }


def test_the_batch_with_the_fewest_lines_in_flight_chooses():
    numbers = {"a": 7, "b": 3, "c": 9}
    queues = [queue(name, [key(n, 1), key(n, 2)], num_here=n) for name, n in numbers.items()]
    assert [name for name, _ in chosen(queues, limit=6)] == ["b", "b", "a", "a", "c", "c"]


def test_late_batches_come_before_the_lines_of_others_about_their_documents():
    many = queue("many", [key(n % 30, n) for n in range(300)])
    late = queue("late", [key(n, 999) for n in range(30)], num_here=50, due=100.0)
    found = chosen([many, late], limit=40, begun=[key(3)])
    assert [name for name, _ in found] == ["late"] * 30 + ["many"] * 10
    assert {document for _, document in found[30:]} == {3}


def test_a_prefix_that_very_many_lines_share_keeps_no_batches_together():
    """It stays in the cache; otherwise the lines of a large batch would come with one of a small
    batch as long as there are any."""
    large = queue("large", [key(1, n) for n in range(2 * MOST_ABOUT_ONE)])
    small = queue("small", [key(1, 10_000 + n) for n in range(100)])
    names = Counter(name for name, _ in chosen([large, small], limit=100))
    assert names == {"large": 50, "small": 50}


@pytest.mark.parametrize("size", [7, 20, 33])
def test_what_is_set_aside_ends_between_documents(size):
    queues = [queue(name, [key(n // size, n) for n in range(40 * size)]) for name in "ab"]
    found = chosen(queues, limit=64, num_ahead=100)
    assert 64 + 50 <= len(found) <= 164 + TO_A_BORDER
    assert set(Counter(document for _, document in found).values()) == {2 * size}


def test_documents_that_are_begun_are_finished_before_others_are_chosen():
    queues = [
        queue("many", [key(n // 10, n) for n in range(100)], num_here=90),
        queue("none", [key(50 + n // 10, n) for n in range(100)]),
    ]
    found = chosen(queues, limit=22, begun=[key(4, 999), key(6, 999)])
    assert found[:20] == [("many", 4)] * 10 + [("many", 6)] * 10
    assert [name for name, _ in found[20:]] == ["none"] * 2
