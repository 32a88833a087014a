"""Groups are who reads the same slots, and the plan reads each of them once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_kernels import host as host_module
from cosched_kernels.compile_table import document_bytes
from cosched_kernels.groups import PrefixForest, Shared, groups_of
from cosched_kernels.host import compiled_host
from cosched_kernels.plan import HeadShape, Tiling, bytes_moved, make_plan, plan_by_arrays
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


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.booleans(),
        st.lists(st.integers(0, 1), max_size=10),
        st.integers(0, 1),
    ),
    max_size=30,
)
"""Who comes, with 300 tokens that others have too or without, with which others, in which
namespace. Who is in already goes, and without tokens comes no more."""


def after(forest, changes):
    """Who is in a forest after these changes: their members and what they share, the oldest
    first."""
    running = {}
    for name, is_long, tokens, namespace in changes:
        if name in running:
            forest.remove(running.pop(name)[0])
        if tokens:
            tokens = np.array([7] * 300 * is_long + tokens)
            length = len(tokens) - len(tokens) % forest.page_size
            request = Shared(namespace=namespace, tokens=tokens, length=length)
            running[name] = forest.put(request), request
    assert len(forest) == len(running)
    return list(running.values())


def assert_same(one, other):
    """Every number of two groups or plans."""
    fields = getattr(one, "_fields", ("items", "starts", "token_order", "bases", "rows"))
    for field in fields:
        a, b = getattr(one, field), getattr(other, field)
        assert np.array_equal(a, b), field
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), field


@given(CHANGES, st.sampled_from([1, 2]), st.sampled_from([1, 300, 900]), st.data())
def test_coming_and_going_leaves_no_trace(changes, page_size, min_saved, data):
    """Groups and plan of any who are in are, number by number, those made from nothing but them,
    whoever was in before."""
    forest = PrefixForest(page_size=page_size)
    running = after(forest, changes)
    running = [one for one in running if data.draw(st.booleans())] or running
    new = PrefixForest(page_size=page_size)
    again = [new.put(request) for _, request in running]
    index = data.draw(st.permutations(range(len(running))))
    found = forest.groups([running[i][0] for i in index], min_saved=min_saved)
    expected = new.groups([again[i] for i in index], min_saved=min_saved)
    assert_same(found, expected)
    if running:
        own = np.array(data.draw(st.lists(st.integers(1, 90), min_size=8, max_size=8)))
        own = own[: len(running)]
        lengths = {
            "num_queries": np.ones_like(own) if data.draw(st.booleans()) else own,
            "seq_lens": np.array([running[i][1].length for i in index]) + own,
        }
        tiling = Tiling(rows=(16, 64), programs=4)
        plans = [make_plan(g, **lengths, heads=LLAMA_8B, tiling=tiling) for g in (found, expected)]
        assert_same(*plans)


@given(CHANGES, st.sampled_from([1, 2]), st.sampled_from([1, 300, 900]), st.data())
def test_compiled_groups_are_those_of_arrays(changes, page_size, min_saved, data):
    forest = PrefixForest(page_size=page_size)
    members = [member for member, _ in after(forest, changes) if data.draw(st.booleans())]
    asked = np.array(data.draw(st.permutations(members)), dtype=np.int64)
    by_arrays = forest._groups_by_arrays(asked, min_saved)
    assert_same(forest._make_groups(asked, min_saved), by_arrays)
    forest._host = None
    assert_same(forest._make_groups(asked, min_saved), by_arrays)


@given(
    st.integers(0, 2**32),
    st.sampled_from([(16, 64), (16, 64, 128)]),
    st.sampled_from([4, 66]),
    st.booleans(),
)
def test_compiled_plans_are_those_of_arrays(seed, rows, programs, is_decode):
    """Trees with many levels, more members than a tile holds, spans that are split, prefills of
    several tiles."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 3, rng.integers(1, 900)) for _ in range(rng.integers(1, 4))]
    requests = []
    for _ in range(rng.integers(1, 60)):
        document = documents[rng.integers(len(documents))]
        cut = rng.integers(0, len(document) + 1) if rng.random() < 0.3 else len(document)
        tokens = np.concatenate((document[:cut], rng.integers(0, 2, rng.integers(0, 5))))
        requests.append(Shared(namespace=None, tokens=tokens, length=len(tokens)))
    num_queries = rng.integers(1, 2 if is_decode else 90, len(requests))
    lengths = {
        "num_queries": num_queries,
        "seq_lens": np.array([r.length for r in requests])
        + num_queries
        + rng.integers(0, 900, len(requests)),
    }
    groups = groups_of(requests, min_saved=int(rng.choice([1, 50, 512])))
    options = {"heads": LLAMA_8B, "tiling": Tiling(rows=rows, programs=programs)}
    assert_same(
        make_plan(groups, **lengths, **options), plan_by_arrays(groups, **lengths, **options)
    )


def test_compiled_code_takes_no_other_numbers():
    host = compiled_host()
    assert host is not None, "Triton needs a C compiler wherever it runs, and so does this test"
    groups = groups_of([Shared(namespace=None, tokens=np.zeros(4, int), length=4)] * 3)
    options = {"heads": LLAMA_8B, "tiling": Tiling()}
    ones, fives = np.ones(3, dtype=np.int64), np.full(3, 5)
    for wrong in (ones.astype(np.int32), ones.astype(float)):
        with pytest.raises(TypeError, match="not of int64"):
            make_plan(groups, num_queries=wrong, seq_lens=fives, **options)
    with pytest.raises(ValueError, match="belong together"):
        make_plan(groups, num_queries=np.ones(2, dtype=np.int64), seq_lens=fives, **options)
    with pytest.raises(AssertionError, match="a new token in a shared prefix"):
        make_plan(groups, num_queries=ones, seq_lens=fives - 1, **options)
    with pytest.raises(AssertionError, match="every request has a new token"):
        make_plan(groups, num_queries=ones - 1, seq_lens=fives, **options)
    far = groups._replace(order=groups.order + 1)
    with pytest.raises(ValueError, match="none of the batch"):
        make_plan(far, num_queries=ones, seq_lens=fives, **options)


def test_without_a_compiler_arrays_do_it(monkeypatch, tmp_path):
    said = []
    # Not `caplog`: whoever configures logging in this process may have cut it off.
    monkeypatch.setattr(
        host_module.logger, "warning", lambda text, *about: said.append(text % about)
    )
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled_host.__wrapped__() is None
    assert len(said) == 1 and "without compiled code" in said[0]


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


@pytest.mark.parametrize("batch", [8, 16, 32, 64, 128, 256])
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
