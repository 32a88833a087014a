"""What stands in for GPU kernels on a CPU gives the same as a plain reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.cpu_attention import attend
from cosched.engine.cpu_paging import _alloc_decode, _alloc_extend


def reference_attention(query, key, value):
    """[heads, n, size] over [kv heads, length, size], one query at a time."""
    heads, num_queries, size = query.shape
    length = key.shape[1]
    key = key.repeat_interleave(heads // key.shape[0], dim=0)
    value = value.repeat_interleave(heads // value.shape[0], dim=0)
    rows = []
    for index in range(num_queries):
        seen = length - num_queries + index + 1
        weights = (query[:, index : index + 1] @ key[:, :seen].transpose(1, 2)) / size**0.5
        rows.append(weights.softmax(-1) @ value[:, :seen])
    return torch.cat(rows, dim=1)


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 40),
    num_new=st.integers(1, 40),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_attention_of_new_tokens_over_a_cached_prefix(length, num_new, groups, seed):
    num_new = min(num_new, length)
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(2 * groups, num_new, 8, generator=rng)
    key, value = torch.randn(2, 2, length, 8, generator=rng)
    result = attend(query, key, value, scale=None, enable_gqa=groups > 1)
    torch.testing.assert_close(result, reference_attention(query, key, value))


@settings(deadline=None, max_examples=60)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    new=st.lists(st.integers(1, 40), min_size=5, max_size=5),
)
def test_pages_are_filled_before_new_ones_are_taken(page_size, lengths, new):
    """Each request's slots stay contiguous within pages, and no page serves two requests."""
    next_page = 1
    slots = []
    for length in lengths:
        num_pages = -(-length // page_size)
        slots.append([next_page * page_size + i for i in range(length)])
        next_page += num_pages
    free_pages = torch.arange(next_page, next_page + 200)

    grown = [length + n for length, n in zip(lengths, new, strict=False)]
    out = torch.empty(sum(grown) - sum(lengths), dtype=torch.int64)
    last = torch.tensor([s[-1] for s in slots])
    _alloc_extend(torch.tensor(lengths), torch.tensor(grown), last, free_pages, out, 8, page_size)
    begin = 0
    for request, count in zip(slots, new, strict=False):
        request += out[begin : begin + count].tolist()
        begin += count
    _check_layout(slots, page_size)

    taken = sum(-(-len(s) // page_size) for s in slots)
    free_pages = torch.arange(taken + 1, taken + 50)
    out = torch.empty(len(slots), dtype=torch.int64)
    _alloc_decode(
        torch.tensor([len(s) + 1 for s in slots]),
        torch.tensor([s[-1] for s in slots]),
        free_pages,
        out,
        8,
        page_size,
    )
    for request, slot in zip(slots, out.tolist(), strict=True):
        request.append(slot)
    _check_layout(slots, page_size)


def _check_layout(slots, page_size):
    owners = {}
    for owner, request in enumerate(slots):
        for position, slot in enumerate(request):
            assert slot % page_size == position % page_size
            assert owners.setdefault(slot // page_size, owner) == owner
    assert len({slot for request in slots for slot in request}) == sum(map(len, slots))


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_lack_of_pages_changes_nothing(num_free):
    out = torch.full((2,), -1)
    full = torch.tensor([5, 9])  # both start a new page of 4
    _alloc_decode(full, full - 2, torch.arange(num_free), out, 2, 4)
    assert out.tolist() == [-1, -1]
