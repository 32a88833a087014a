"""The attention backend that reads a shared prefix once, in SGLang's real scheduler: it gives the
tokens of SGLang's own backends."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner_utils import capture_mode

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.port import extend_attention
from cosched.engine.port.attention import describe_sharing
from cosched.engine.prefix_sharing import NAME
from cosched.engine.read_state import state_of
from cosched.errors import ConfigError
from cosched_kernels.picker import DeviceModel, write_model
from tests.engine.conftest import FLAGS, OFFLINE, assert_drained, outputs, prompt

SWITCHES = ("--enable-mixed-chunk", "--disable-overlap-schedule")


def questions(engine, *, documents=2, each=3, num_new=8, length=40):
    """Questions about documents. The first one about each puts its KV into the tree."""
    for document in range(documents):
        head = prompt(document + 1, length)
        engine.submit(f"d{document}", head, max_new_tokens=2, priority=OFFLINE)
    engine.run_until_idle()
    for index in range(documents * each):
        document = index % documents
        # Some continue alike, so that there are levels below the document.
        tokens = prompt(document + 1, length) + prompt(50 + index % 4, 16) + prompt(90 + index, 5)
        engine.submit(f"q{index}", tokens, max_new_tokens=num_new, priority=-(index % 2))
    engine.run_until_idle()


def shared_of(engine):
    return engine.scheduler.tp_worker.model_runner.attn_backend.cosched_shared


def run(make_engine, attention, work, *, kernels="triton", **options):
    config = {"shared_prefix": {"min_saved_tokens": 1, "kernels": kernels}}
    engine = make_engine(attention_backend=attention, config=config, **options)
    if attention == NAME:
        check_groups(engine)
    work(engine)
    assert_drained(engine)
    return engine, outputs(engine)


def check_groups(engine):
    """Check from now on that what a plan shares is the same slots in the rows of all members."""
    shared = shared_of(engine)
    groups_of, rows = shared._groups, shared._req_to_token

    def checked(batch):
        groups = groups_of(batch)
        for begin, end, last in zip(groups.begin, groups.end, groups.last, strict=True):
            members = [batch.reqs[i].kv.req_pool_idx for i in groups.order[begin:end]]
            assert (rows[members, :last] == rows[members[0], :last]).all()
        return groups

    shared._groups = checked


@pytest.mark.parametrize(
    ("page_size", "overlap", "kernels"),
    [(1, True, "triton"), (16, False, "triton"), (16, True, "cascade")],
)
def test_tokens_of_prefills_decodes_and_mixed_batches(make_engine, page_size, overlap, kernels):
    options = {"page_size": page_size, "overlap": overlap}
    _, expected = run(make_engine, "torch_native", questions, **options)
    engine, found = run(make_engine, NAME, questions, kernels=kernels, **options)
    assert (shared_of(engine)._cascade is None) == (kernels == "triton")
    assert found == expected
    assert shared_of(engine).runs.num_iterations > 5


def test_a_backend_of_sglangs_is_extended_where_that_is_asked(make_engine):
    """And it is counted. On a CPU `auto` is off."""
    least = {"min_saved_tokens": 1}
    lines, replies = {}, {}
    for mode in ("auto", "off", "on"):
        engine = make_engine(config={"shared_prefix": {"mode": mode} | least}, overlap=True)
        questions(engine)
        lines[mode] = describe_sharing(engine.scheduler.server_args)
        replies[mode], state = outputs(engine), state_of(engine.scheduler.cosched)
        assert (state.shared_prefix is not None) == engine.scheduler.cosched.caps.shared_prefix
        assert (state.shared_prefix is not None) == (mode == "on")
        assert_drained(engine)
    assert replies["on"] == replies["off"] == replies["auto"]
    assert state.shared_prefix.num_iterations > 5
    assert state.shared_prefix.num_decodes > 2 * state.shared_prefix.num_iterations
    assert lines["auto"] == "shared-prefix attention off: there is no GPU"
    assert lines["off"] == "shared-prefix attention off: --cosched-shared-prefix off"
    assert lines["on"].startswith("shared-prefix attention on, beside torch_native")


def test_a_model_that_cannot_share_is_refused_only_where_it_must(make_engine, monkeypatch):
    monkeypatch.setattr(extend_attention, "_MAX_HEAD_DIM", 8)
    why = "heads have 64 numbers in keys, 64 in values"
    with pytest.raises(ConfigError, match=f"--cosched-shared-prefix on is not possible: {why}"):
        make_engine(config={"shared_prefix": {"mode": "on"}})
    engine = make_engine(attention_backend=NAME)
    assert describe_sharing(engine.scheduler.server_args) == f"shared-prefix attention off: {why}"


def test_without_a_radix_tree_nothing_is_shared(make_engine):
    engine, found = run(
        make_engine, NAME, questions, policy="sglang", switches=("--disable-radix-cache",)
    )
    assert shared_of(engine).runs.num_iterations == 0
    assert all(found.values())


def test_decodes_of_a_mixed_batch_are_packed_though_nothing_is_shared(make_engine):
    """With an inner backend that computes a tile for each of their heads, as Triton's does."""

    def chats(engine):
        def act(iteration):
            if iteration < 4:
                tokens = prompt(60 + iteration, 20 + 9 * iteration)
                engine.submit(f"c{iteration}", tokens, max_new_tokens=8)

        engine.run_until_idle(on_iteration=act)
        assert_drained(engine)
        return outputs(engine)

    expected = chats(make_engine(attention_backend="torch_native", page_size=16))
    engine = make_engine(attention_backend=NAME, page_size=16)
    shared = shared_of(engine)
    assert shared._device_model.other_packs
    shared._device_model = DeviceModel(other_flops=1e6, flops=1e15, launch_s=0).beside("triton")
    make_plan, plans = shared._make_plan, []

    def noted(groups, num_queries, seq_lens):
        plans.append((groups.num_groups, sorted(num_queries.tolist())))
        return make_plan(groups, num_queries, seq_lens)

    shared._make_plan = noted
    assert chats(engine) == expected
    assert shared.runs.num_iterations == len(plans) > 1
    for num_groups, num_queries in plans:
        assert num_groups == 0 and num_queries[0] == 1 < num_queries[-1]


def test_tokens_of_decodes_in_graphs(make_engine, monkeypatch):
    """The steps of SGLang's graph runner without graphs: a variant is chosen for a batch, its plan
    goes into the fixed buffers, and what was captured for that variant runs."""
    _, expected = run(make_engine, "torch_native", questions)
    config = {"shared_prefix": {"min_saved_tokens": 1}}
    engine = make_engine(attention_backend=NAME, config=config)
    shared = shared_of(engine)
    backend = engine.scheduler.tp_worker.model_runner.attn_backend
    variants = decode_cuda_graph_runner.create_attention_graph_variants(
        engine.scheduler.model_config.hf_config
    )
    assert variants.capture_labels == ("plain", "shared")
    shared.begin_graphs(8)
    shared.load_for_graph(in_capture=True)
    addresses = shared._fixed.tensors.items.data_ptr(), shared._fixed.tensors.pieces.data_ptr()
    prepare, chosen = shared.prepare, []

    def begin(forward_batch):
        if not forward_batch.forward_mode.is_decode():
            monkeypatch.setattr(capture_mode, "_capture_attention_variant", None)
            prepare(forward_batch)
            return
        label = variants.select(forward_batch)
        chosen.append(label)
        view = SimpleNamespace(forward_mode=forward_batch.forward_mode)
        backend.init_forward_metadata_out_graph(view)
        monkeypatch.setattr(capture_mode, "_capture_attention_variant", label)

    monkeypatch.setattr(shared, "prepare", begin)
    questions(engine)
    assert outputs(engine) == expected
    assert set(chosen) == {"plain", "shared"}
    assert addresses == (
        shared._fixed.tensors.items.data_ptr(),
        shared._fixed.tensors.pieces.data_ptr(),
    )


def test_an_error_in_planning_does_not_end_the_server(make_engine, monkeypatch):
    _, expected = run(make_engine, "torch_native", questions)
    config = {"shared_prefix": {"min_saved_tokens": 1}, "strict": False}
    engine = make_engine(attention_backend=NAME, config=config)
    shared = shared_of(engine)

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(shared, "_groups", broken)
    questions(engine)
    assert outputs(engine) == expected
    assert shared.runs.num_iterations == 0


def test_the_inner_backend_computes_layers_that_the_kernels_do_not_support(make_engine):
    engine = make_engine(attention_backend=NAME, config={"shared_prefix": {"min_saved_tokens": 1}})
    shared, asked = shared_of(engine), []
    traits = {"logit_cap": 30.0, "sliding_window_size": 8, "is_cross_attention": True}

    def can_attend(q, k, v, layer, kwargs):
        def can(**options):
            return type(shared).can_attend(shared, q, k, v, layer, kwargs | options)

        if can():
            asked.append(layer)
            for name, value in traits.items():
                with mock.patch.object(layer, name, value):
                    assert not can()
            assert can(sinks=None) and not can(sinks=q)
        return can()

    shared.can_attend = can_attend
    questions(engine, num_new=3)
    assert asked


def test_wrong_settings_are_refused(make_engine, tmp_path):
    path = tmp_path / "picker.json"
    write_model(path, DeviceModel(), device_name="H200", origin="a test")
    for key, value, message in (
        ("inner", "fa33", "unknown shared_prefix.inner 'fa33'; choose from .*fa3"),
        ("device_model", str(path), "device_model: .* was measured on 'H200', and this is"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(attention_backend=NAME, config={"shared_prefix": {key: value}})
    assert_drained(make_engine())  # the process is as it was


def asked_in_turns(engine):
    """Prefills, decodes, mixed batches, and a request that is preempted and resumed."""
    stopped = []
    engine.watch_stops(stopped.append)
    head = prompt(1, 12)
    engine.submit("d", head, max_new_tokens=1, priority=OFFLINE)
    engine.run_until_idle()

    def act(iteration):
        if iteration == 0:
            for index in range(2):
                tokens = head + prompt(90 + index, 2)
                engine.submit(f"q{index}", tokens, max_new_tokens=4, priority=OFFLINE)
        elif iteration == 2:
            engine.submit("o", head + prompt(70, 2), max_new_tokens=2)

    engine.run_until_idle(on_iteration=act)
    assert stopped
    return outputs(engine)


INTERPRETED = """
import json, sys
import cosched.bootstrap
from cosched_kernels.interpret import repair_interpreter
repair_interpreter()
from cosched.lab.local_engine import LocalEngine
from tests.engine.test_shared_prefix import asked_in_turns, shared_of

with LocalEngine(sys.argv[1:]) as engine:
    shared, modes = shared_of(engine), set()
    plan_for = shared._plan_for
    def noted(batch):
        plan = plan_for(batch)
        if plan is not None:
            modes.add(batch.forward_mode.name)
        return plan
    shared._plan_for = noted
    print(json.dumps([asked_in_turns(engine), shared._kernels.__name__, sorted(modes)]))
"""


@pytest.mark.long
def test_the_kernels_give_the_tokens_of_torch(tiny_model, make_engine):
    """Beside SGLang's Triton kernels. Under the interpreter, in a process of its own: it is chosen
    at import."""
    shared = {"mode": "on", "min_saved_tokens": 1}
    config = {"policy": "sarathi", "strict": True, "shared_prefix": shared}
    environment = os.environ | {"TRITON_INTERPRET": "1", "COSCHED_CONFIG": json.dumps(config)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    flags = FLAGS | {"--model-path": str(tiny_model), "--attention-backend": "triton"}
    flags["--max-running-requests"] = "2"
    arguments = [text for pair in flags.items() for text in pair]
    running = subprocess.Popen(
        [sys.executable, "-c", INTERPRETED, *arguments, *SWITCHES],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    expected = asked_in_turns(make_engine(max_running_requests=2))
    out, errors = running.communicate()
    assert running.returncode == 0, errors[-3000:]
    found, kernels, modes = json.loads(out.splitlines()[-1])
    assert kernels == "cosched_kernels.shared_prefix"
    assert {"DECODE", "EXTEND", "MIXED"} <= set(modes)
    assert found == expected
