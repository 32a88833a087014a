"""Groups are who reads the same slots, and the plan reads each of them once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_kernels.compile_table import document_bytes
from cosched_kernels.groups import PrefixForest, Shared, groups_of
from cosched_kernels.plan import HeadShape, Tiling, bytes_moved, make_plan
from tests.kernels.batches import Batch, trees

LLAMA_8B = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)


@st.composite
def batches(draw):
    page_size = draw(st.sampled_from([1, 4]))
    requests = draw(trees(page_size=page_size, max_requests=8))
    own = [draw(st.integers(1, 5)) for _ in requests]
    return Batch(requests, own=own, new=[1] * len(own), page_size=page_size)


@given(batches(), st.sampled_from([1, 8, 40]))
def test_a_group_reads_what_all_of_its_members_have(batch, min_saved):
    """Its KV positions are the same slots in the rows of all, begin where the group around it ends,
    are cut at pages, and save what was asked for."""
    groups = batch.groups(min_saved)
    assert sorted(groups.order) == list(range(len(batch.own)))
    read = np.zeros(len(batch.own), dtype=int)
    for begin, end, first, last in zip(
        groups.begin, groups.end, groups.first, groups.last, strict=True
    ):
        members = groups.order[begin:end]
        rows = batch.req_to_token[batch.pool_rows[members], first:last]
        assert (rows == rows[0]).all()
        assert (read[members] == first).all()
        assert last % batch.page_size == 0
        assert (end - begin - 1) * (last - first) >= min_saved
        read[members] = last
    assert (groups.own == read[groups.order]).all()


@given(batches())
def test_every_shared_slot_is_read_once(batch):
    """With groups as small as they come, the plan reads as many KV tokens as there are slots."""
    rows = [
        batch.req_to_token[batch.pool_rows[i], :n].tolist() for i, n in enumerate(batch.seq_lens)
    ]
    slots = {slot for row in rows for slot in row}
    moved = bytes_moved(batch.plan(), batch.heads)
    assert moved.kv == len(slots) * batch.heads.kv_bytes_per_token
    saved = int(batch.seq_lens.sum()) - len(slots)
    assert batch.groups().saved_tokens == saved


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), max_size=10), st.integers(0, 1)),
        max_size=30,
    ),
    st.sampled_from([1, 2]),
)
def test_coming_and_going_leaves_no_trace(changes, page_size):
    """The groups of who is in now do not depend on who was in before."""
    forest, running = PrefixForest(page_size=page_size), {}
    for name, tokens, namespace in changes:
        if name in running:
            forest.remove(running.pop(name)[0])
        if tokens:
            length = len(tokens) - len(tokens) % page_size
            request = Shared(namespace=namespace, tokens=np.array(tokens), length=length)
            running[name] = forest.put(request), request
    assert len(forest) == len(running)
    members, requests = [m for m, _ in running.values()], [r for _, r in running.values()]
    found, expected = (
        {
            (frozenset(g.order[b:e].tolist()), f, last)
            for b, e, f, last in zip(g.begin, g.end, g.first, g.last, strict=True)
        }
        for g in (forest.groups(members), groups_of(requests, page_size=page_size))
    )
    assert found == expected


def test_the_rest_of_a_batch_that_sits_out_changes_nothing_else():
    batch = Batch([[((0,), 8)]] * 3 + [[((1,), 8)]] * 2, own=[1] * 5, new=[1] * 5)
    forest = PrefixForest()
    first, _, third, *others = [forest.put(request) for request in batch.shared]
    groups = forest.groups([first, third])
    assert sorted(groups.order) == [0, 1]
    assert (groups.begin, groups.end, groups.last) == ([0], [2], [8])
    assert forest.groups([first, others[0]]).num_groups == 0
    forest.remove(others[0])
    assert forest.groups([first, third]) is groups  # it does not depend on who else is known
    with pytest.raises(AssertionError, match="not put in"):
        forest.groups([first, others[0], third])
    again = forest.put(batch.shared[3])
    assert again != others[0]
    with pytest.raises(AssertionError, match="not put in"):
        forest.groups([first, again + (1 << 40)])


@pytest.mark.parametrize("batch", [8, 16, 32, 64])
def test_bytes_of_many_questions_on_one_document(batch):
    """At most 10 % above reading the prefix once and each suffix once, pieces, queries, outputs,
    slots and the plan itself included."""
    moved, bound, _ = document_bytes(
        batch=batch, prefix=10_000, suffix=200, heads=LLAMA_8B, tiling=Tiling()
    )
    assert moved.kv == bound
    assert moved.total <= 1.1 * bound
    # A tile of 128 rows holds 32 requests; more of them ask the device's cache for the rest.
    assert moved.kv_asked <= bound + (batch - 1) // 32 * 10_000 * LLAMA_8B.kv_bytes_per_token


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 50))
def test_a_plan_grows_with_its_decodes(lengths, steps):
    """What `grown` gives is a plan for longer sequences: the same spans, the last ones grown."""
    seq_lens = np.array(lengths)
    requests = [Shared(namespace=None, tokens=np.zeros(n, int), length=n - 1) for n in lengths]
    plan = make_plan(
        groups_of(requests),
        num_queries=np.ones_like(seq_lens),
        seq_lens=seq_lens,
        heads=LLAMA_8B,
        tiling=Tiling(programs=2),
    )
    grown = plan.grown(seq_lens + steps)
    before = (plan.column("kv_end") - plan.column("kv_begin")).sum()
    after = (grown.column("kv_end") - grown.column("kv_begin")).sum()
    assert after - before == steps * len(lengths)
    for request, end, limit in zip(
        grown.column("request"), grown.column("kv_end"), grown.column("limit"), strict=True
    ):
        assert end <= seq_lens[request] + steps
        assert limit >= seq_lens[request] + steps - 1
