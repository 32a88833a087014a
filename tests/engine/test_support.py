"""What cosched says of a server before anything is loaded, asked of SGLang's own argument code."""

import pytest

from cosched.engine.prefix_sharing import NOT_SHARED_WITH
from cosched.engine.support import REFUSED_ARGUMENTS
from tests.resolve_servers import resolve_servers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SIZES}
QWEN3_NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **SIZES}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **SIZES}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {"model_type": "qwen3_vl_text", **SIZES},
    "vision_config": {"model_type": "qwen3_vl", "hidden_size": 64, "out_hidden_size": 64},
}
EMBEDDING_GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "use_bidirectional_attention": True,
    **SIZES,
}
GROUP = ["--tp", "2", "--dp", "2", "--enable-dp-attention"]
DECODE = ["--disaggregation-mode", "decode"]
PREFILL = ["--disaggregation-mode", "prefill"]
Q8 = ["--dsa-prefill-backend", "flashmla_sparse_q8"]
HOST = ["--enable-hierarchical-cache"]
TRITON = ["--attention-backend", "triton"]
FOR_PREFILLS = ["--prefill-attention-backend", "triton", "--decode-attention-backend", "fa3"]
FOR_DECODES = ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "triton"]
MIXED = ["--enable-mixed-chunk"]
DRAFT = ["--speculative-draft-model-path", "{folder}"]
BATCHES = {"batches": {"folder": "/tmp/batches"}}
POSTGRESQL = {"batches": {"folder": "/tmp/batches", "url": "postgresql://me@host/batches"}}
CLAIMS = {"claims": {"keys": {"tenant": {"max_online": 1}}}}

CASES = {
    "plain": (QWEN3, [], {}),
    "tp": (QWEN3, ["--tp", "2"], {}),
    "qwen3-vl": (QWEN3_VL, [], {}),
    "qwen3-vl with SGLang's order": (QWEN3_VL, ["--radix-eviction-policy", "priority"], {}),
    "states": (QWEN3_NEXT, [], {}),
    "states and host memory": (QWEN3_NEXT, HOST, {}),
    "sliding window": (GPT_OSS, [], {}),
    "windows in shared memory": (GPT_OSS, ["--enable-unified-memory"], {}),
    "windows and host memory": (GPT_OSS, HOST, {}),
    "one pool": (GPT_OSS, ["--disable-hybrid-swa-memory"], {}),
    "stock": (GPT_OSS, ["--disable-radix-cache"], {"policy": "sglang"}),
    "two flags": (QWEN3, ["--disable-radix-cache", "--enable-pdmux"], {"policy": "hygen"}),
    "DP attention": (QWEN3, GROUP, {}),
    "DP attention, other policy": (QWEN3, GROUP, {"policy": "sarathi"}),
    "stages": (QWEN3, ["--pp-size", "2", "--tp", "2"], {}),
    "stages, other policy": (QWEN3, ["--pp-size", "2"], {"policy": "sarathi"}),
    "decode server": (QWEN3, [*DECODE, "--disaggregation-transfer-backend", "fake"], {}),
    "decode server, stages": (QWEN3, [*DECODE, "--pp-size", "2"], {}),
    "prefill server": (QWEN3, PREFILL, {}),
    "prefill server, stages": (QWEN3, [*PREFILL, "--pp-size", "2"], {}),
    "stages and host memory": (QWEN3, ["--pp-size", "2", *HOST], {}),
    "prefill delayer": (QWEN3, [*GROUP, "--enable-prefill-delayer"], {}),
    "drafts": (QWEN3, ["--speculative-algorithm", "nextn", *DRAFT], {}),
    "drafts and host memory": (QWEN3, ["--speculative-algorithm", "EAGLE", *DRAFT, *HOST], {}),
    "a model's flag": (EMBEDDING_GEMMA, ["--is-embedding"], {}),
    "turns": (QWEN3, Q8, {}),
    "turns, mixed by the user": (QWEN3, [*Q8, *MIXED], {}),
    "triton": (QWEN3, TRITON, {}),
    "triton for prefills": (QWEN3, FOR_PREFILLS, {}),
    "triton for decodes": (QWEN3, FOR_DECODES, {}),
    "triton, mixed by the user": (QWEN3, [*TRITON, *MIXED], {}),
    "triton, stock": (QWEN3, TRITON, {"policy": "sglang"}),
    "triton, deterministic": (QWEN3, [*TRITON, "--enable-deterministic-inference"], {}),
    "triton, shared": (QWEN3, TRITON, {"shared_prefix": {"mode": "on"}}),
    "fa3, shared": (QWEN3, [], {"shared_prefix": {"mode": "on"}}),
    "fa4, shared": (QWEN3, ["--attention-backend", "fa4"], {"shared_prefix": {"mode": "on"}}),
    "stock, shared": (QWEN3, TRITON, {"policy": "sglang", "shared_prefix": {"mode": "on"}}),
    "host memory": (QWEN3, HOST, {}),
    "host memory, two ranks": (QWEN3, [*HOST, "--tp", "2"], {}),
    "host memory, two ranks, write back": (
        QWEN3,
        [*HOST, "--tp", "2", "--hicache-write-policy", "write_back"],
        {},
    ),
    "host memory over files": (QWEN3, [*HOST, "--hicache-storage-backend", "file"], {}),
    "LRU, two ranks": (QWEN3, [*HOST, "--tp", "2"], {"kv": {"eviction": "lru"}}),
    "gRPC": (QWEN3, ["--smg-grpc-mode"], {}),
    "gRPC and batches": (QWEN3, ["--smg-grpc-mode"], BATCHES),
    "encoder": (QWEN3_VL, ["--encoder-only"], {}),
    "HTTP processes": (QWEN3, ["--tokenizer-worker-num", "4"], {}),
    "HTTP processes and batches": (QWEN3, ["--tokenizer-worker-num", "4"], BATCHES),
    "HTTP processes, PostgreSQL": (QWEN3, ["--tokenizer-worker-num", "4"], POSTGRESQL),
    "HTTP processes and claims": (QWEN3, ["--tokenizer-worker-num", "4"], CLAIMS),
    "Rust front end": (QWEN3, [], {}, {"SGLANG_RUST_SERVER": "1"}),
}


@pytest.fixture(scope="module")
def answers():
    """By the name of the case."""
    servers = [
        {
            "files": {"config.json": model},
            "flags": ["--model-path", "{folder}", *flags],
            "config": config,
            "environment": environment[0] if environment else {},
        }
        for model, flags, config, *environment in CASES.values()
    ]
    return dict(zip(CASES, resolve_servers(servers), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "tp",
        "states",
        "DP attention",
        "stages",
        "prefill server",
        "drafts",
        "one pool",
        "sliding window",
        "host memory",
        "host memory, two ranks",
        "LRU, two ranks",
        "HTTP processes, PostgreSQL",
    ],
)
def test_plain_models_are_planned(answers, name):
    assert answers[name]["verdict"] == "planned"


def test_a_default_of_the_model_is_not_held_against_the_user(answers):
    """On an H100 SGLang evicts Qwen3-VL's KV by priority, unless an order is given."""
    assert answers["qwen3-vl"]["verdict"] == "planned"
    assert "drop the flag" in answers["qwen3-vl with SGLang's order"]["refused"][0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("states and host memory", "with state-space or linear-attention layers: what is copied"),
        ("windows in shared memory", "with sliding windows: the two KV pools take each other's"),
        ("encoder", "an encoder generates nothing"),
        ("DP attention, other policy", "do not know of ranks that step together; choose from"),
        ("stages, other policy", "do not know of other microbatches; choose from cosched"),
        ("stages and host memory", "--pp-size with --enable-hierarchical-cache is not tested"),
        ("decode server, stages", "a decode server with --pp-size 2 is not supported"),
        ("prefill server, stages", "a prefill server with --pp-size 2 is not supported"),
        ("gRPC and batches", "--smg-grpc-mode has a front end that is not SGLang's"),
        ("HTTP processes and batches", "give --cosched-batches-url postgresql://"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(answers, name, reason):
    assert answers[name]["verdict"] == "refused"
    assert any(reason in one for one in answers[name]["refused"])


def test_all_reasons_are_given_at_once(answers):
    refused = answers["two flags"]["refused"]
    assert len(refused) == 2
    assert all("drop the flag or use --cosched-policy sglang" in reason for reason in refused)


def test_a_backend_that_mixes_nothing_is_known_before_weights_are_loaded(answers):
    """SGLang refuses it with mixed batches when the weights are loaded."""
    assert answers["turns"]["verdict"] == "planned"
    assert "flashmla_sparse_q8 does not support" in answers["turns, mixed by the user"]["error"]


@pytest.mark.parametrize(
    ("name", "mixes", "said"),
    [
        ("plain", True, None),
        ("triton for decodes", True, None),
        ("triton", False, "take turns (no --enable-mixed-chunk): attention backend triton takes 8"),
        ("triton for prefills", False, "take turns (no --enable-mixed-chunk): attention backend"),
        ("triton, mixed by the user", True, "warning: --enable-mixed-chunk makes chat and jobs"),
        ("triton, stock", False, None),
    ],
)
def test_prefills_and_decodes_take_turns_where_mixed_batches_are_slow(answers, name, mixes, said):
    """A mixed batch runs in the attention backend of prefills."""
    assert answers[name]["mixes"] is mixes
    assert answers[name]["verdict"].startswith("planned") or name.endswith("stock")
    lines = answers[name]["said"]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("triton", None),
        ("triton, shared", None),
        ("fa3, shared", None),
        ("stock, shared", None),
        ("plain", "not measured beside attention backend fa3; --cosched-shared-prefix on takes it"),
        ("triton for prefills", "prefills have attention backend triton, decodes fa3"),
        ("triton, stock", "policy sglang is SGLang as it is"),
        ("triton, deterministic", "--enable-deterministic-inference: what a request shares"),
        ("fa4, shared", "attention backend fa4 cannot be extended; choose from fa3, flashinfer"),
    ],
)
def test_where_attention_reads_a_shared_prefix_once(answers, name, reason):
    found = answers[name]["why_not_shared"]
    assert found == reason if reason is None else reason in found
    is_refused = reason is not None and name.endswith(", shared")
    refused = answers[name]["refused"]
    assert (len(refused) == 1 and reason in refused[0]) if is_refused else not refused


def test_nobody_is_asked_to_drop_a_flag_that_the_model_set(answers):
    (reason,) = answers["a model's flag"]["refused"]
    assert "disable-radix-cache" in reason and "the model or another flag sets it" in reason
    assert "drop" not in reason


def test_sglangs_own_policy_refuses_nothing(answers):
    assert not answers["stock"]["plans"] and not answers["stock"]["refused"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("host memory, two ranks, write back", "KV eviction by value"),
        ("drafts and host memory", "KV eviction by value"),
        ("host memory over files", "KV eviction by value"),
        ("windows and host memory", "holds the KV of sliding windows too"),
        ("decode server", "has no radix tree"),
        ("gRPC", "service_tier"),
        ("prefill delayer", "the ranks agree on the time"),
        ("Rust front end", "service_tier"),
        ("HTTP processes", "--tokenizer-worker-num 4 need a store"),
        ("HTTP processes and claims", "limits of API keys"),
    ],
)
def test_what_a_server_does_not_have_is_said(answers, name, what):
    assert answers[name]["verdict"].startswith("planned without: ")
    assert any(what in one for one in answers[name]["without"])


def test_every_refused_flag_is_a_server_argument_of_sglang():
    from sglang.srt.server_args import ServerArgs

    fields = {field for cls in ServerArgs.__mro__ for field in getattr(cls, "__annotations__", {})}
    for name, *_ in (*REFUSED_ARGUMENTS, *NOT_SHARED_WITH):
        assert name in fields or hasattr(ServerArgs, name), name
