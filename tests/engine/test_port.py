"""Only the port uses SGLang's names, and what it says of SGLang is true."""

from __future__ import annotations

import ast
import pkgutil
import re
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine import port
from cosched_patches.internals import INTERNALS, _has
from tests.engine.conftest import OFFLINE, assert_drained, prompt, view_now

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = ROOT / "cosched" / "engine" / "port"

# Modules that wrap a part of SGLang, as port modules do: the tree core, the HTTP server, the
# command line, the CPU engine.
TREE_CORE = {"tree_core", "host_core", "kv_manager", "kv_on_host"}
OUTSIDE = {
    "admin",
    "model_operations",
    "shutdown",
    "startup",
    "arguments",
    "options",
    "support",
    "cpu",
}

# What variables of these names hold, by the name of SGLang's class.
NAMES = {
    "Req": r"(chunked_)?req",
    "ScheduleBatch": r"((running|last)_)?batch|active|whole",
    "Scheduler": r"scheduler",
    "UnifiedRadixCache": r"tree(_cache)?",
}


def modules_above_the_port():
    for folder in ("engine", "lab/simulation", "lab/profiling"):
        for path in sorted((ROOT / "cosched" / folder).rglob("*.py")):
            if PORT not in path.parents:
                yield path


def words():
    """Class -> the attributes that any module may name, from the table of docs/porting.md."""
    text = (ROOT / "docs" / "porting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", text, re.MULTILINE)
    return {owner: set(re.findall(r"`(\w+)`", names)) for owner, names in rows if owner in NAMES}


def test_only_the_port_uses_sglangs_names():
    allowed = words()
    assert allowed.keys() == NAMES.keys()
    owners = {
        name: pkgutil.resolve_name(target)
        for target in INTERNALS
        if (name := target.rpartition(".")[2]) in NAMES
    }
    wrong = []
    for path in modules_above_the_port():
        if path.stem in TREE_CORE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            holder = getattr(value, "id", None) or getattr(value, "attr", "")
            for name, owner in owners.items():
                if (
                    re.fullmatch(NAMES[name], holder.strip("_"))
                    and node.attr not in allowed[name]
                    and _has(owner, node.attr)
                ):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    wrong.append(f"{where}: {holder}.{node.attr}; ask cosched.engine.port")
    assert not wrong, "\n".join(wrong)


def test_only_the_port_imports_sglang():
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules_above_the_port()
        if path.stem not in TREE_CORE | OUTSIDE
        and re.search(r"^\s*(from|import) sglang\b", path.read_text(), re.MULTILINE)
    ]
    assert not wrong


def test_copies_to_the_device_do_not_wait_for_it():
    """A copy of pageable memory waits for all that was launched; SGLang's `async_h2d` pins it."""
    copies = re.compile(
        r"\.to\([^)]*device|non_blocking"
        r"|torch\.tensor\((?!\[\])[^()]*(\([^()]*\)[^()]*)*device=(?!.cpu)"
    )
    wrong = [
        f"{path.name}: {found[0]}"
        for path in (ROOT / "cosched" / "engine" / "port").glob("*.py")
        if not path.stem.startswith("cpu")
        for found in copies.finditer(path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_reserve_is_what_the_engine_keeps(make_engine, ignore_eos):
    """A view and SGLang's adder see the same headroom."""
    from sglang.srt.managers.schedule_policy import PrefillAdder

    engine = make_engine(schedule_conservativeness=0.5)
    for i in range(3):
        engine.submit(f"r{i}", prompt(i, 40), max_new_tokens=100, ignore_eos=ignore_eos)
    seen = []

    def look(iteration):
        scheduler = engine.scheduler
        if iteration == 10:
            adder = PrefillAdder(
                scheduler.page_size,
                scheduler.tree_cache,
                scheduler.token_to_kv_pool_allocator,
                scheduler.running_batch,
                scheduler.new_token_ratio_tracker.current,
                1000,
                1000,
            )
            kv = view_now(scheduler).kv
            seen.append((adder.rem_total_tokens, kv.free + kv.evictable - kv.reserved))

    engine.run_until_idle(on_iteration=look)
    [(room, planned)] = seen
    assert room - 2 * 3 <= planned <= room  # whole tokens, and the next one of each
    assert_drained(engine)


@pytest.mark.parametrize("tokens", [0, 50])
def test_what_preemption_gains_is_free_or_evictable_afterwards(make_engine, tokens):
    engine = make_engine()
    shared = prompt(7, tokens)
    engine.submit("first", shared + prompt(1, 60), max_new_tokens=2)
    engine.run_until_idle()
    engine.submit("off", shared + prompt(2, 60), max_new_tokens=50, priority=OFFLINE)
    gains = []

    def stop(iteration):
        scheduler = engine.scheduler
        if iteration == 20:
            [req] = scheduler.running_batch.reqs
            room = port.kv_free(scheduler) + port.kv_evictable(scheduler)
            gain = port.gain_of_stopping(scheduler.tree_cache, req).kv
            assert (gain, 0) == port.gain_of_stopping(scheduler.tree_cache, req)
            port.release(scheduler.tree_cache, req, keep=True)
            port.put_back(scheduler, req)
            scheduler.running_batch.filter_batch(keep_indices=[])
            scheduler.last_batch = None
            gains.append(gain)
            assert port.kv_free(scheduler) + port.kv_evictable(scheduler) - room == gain
            assert port.peek(scheduler.tree_cache, req).num_tokens >= port.num_committed(req)

    engine.run_until_idle(on_iteration=stop)
    assert gains and gains[0] >= 60
    assert len(engine.replies["off"].output_ids) == 50
    assert_drained(engine)


@given(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 60), st.integers(1, 60))
def test_prompts_have_in_common_what_both_begin_with(ids, at, least):
    req = SimpleNamespace(
        origin_input_ids=array("q", ids), output_ids=[], extra_key=None, cache_salt=None
    )
    other = SimpleNamespace(**vars(req))
    changed = [1 - token if n == at else token for n, token in enumerate(ids)]
    other.origin_input_ids = array("q", changed)
    num = min(at, len(ids))
    assert port.num_common(req, other, least) == (num if num >= least else 0)
    other.cache_salt = "mine"
    assert port.num_common(req, other, least) == 0
