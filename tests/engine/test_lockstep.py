"""DP attention, and the stages of a pipeline: real schedulers in two processes, which run together.

500 requests of a pipeline: ``COSCHED_LOCKSTEP_REQUESTS=500 pytest tests/engine/test_lockstep.py -k
pipeline``, about ten minutes.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from cosched.batch.jsonl.server import free_port
from tests.engine.conftest import FLAGS, OFFLINE
from tests.engine.tiny_models import DENSE, LATENT, MIXTURE, SIZES

NUM_RANKS = int(os.environ.get("COSCHED_LOCKSTEP_RANKS", "2"))  # or 4
NUM_REQUESTS = int(os.environ.get("COSCHED_LOCKSTEP_REQUESTS", "12"))
BINDING = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1", "OMP_NUM_THREADS": "1"}
RUN = """
import json, sys
from tests.engine.lockstep import main
with open(sys.argv[2]) as file:
    main(int(sys.argv[1]), json.load(file))
"""


def traffic(number, seed=1, ranks=(0, 1)):
    """Requests of each rank; some share a head, two of three come while others run."""
    choose = random.Random(seed)
    head = [choose.randrange(10, 400) for _ in range(40)]
    requests = [[], []]
    for n in range(number):
        tail = [choose.randrange(10, 400) for _ in range(choose.randrange(5, 90))]
        prompt = (head if choose.random() < 0.4 else []) + tail
        num_tokens, priority = choose.randrange(1, 40), OFFLINE if n % 3 else 0
        moment = 0 if n < number // 3 else choose.randrange(3 * number)
        requests[choose.choice(ranks)].append([f"r{n}", prompt, num_tokens, priority, moment])
    return requests


@pytest.fixture
def group(forks, tmp_path):
    """`group(requests, policy=...)` -> what each rank says at the end."""

    def run(
        requests, *, policy="cosched", num_ranks=2, model=MIXTURE, switches=(), config=None, **task
    ):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | model))
        chosen = FLAGS | {"--nccl-port": str(free_port())}
        if task.get("num_stages"):
            chosen |= {"--pp-size": str(num_ranks), "--max-running-requests": "16"}
            chosen |= {"--max-total-tokens": "600"}
        else:
            chosen |= {"--tp": str(num_ranks)}
            if len(requests) > 1:
                chosen |= {"--dp": "2"}
                switches = (*switches, "--enable-dp-attention")
        flags = ["--model-path", str(tmp_path), "--load-format", "dummy"]
        flags += [text for pair in chosen.items() for text in pair]
        flags += ["--dist-timeout", "60"]  # of ranks that wait for each other
        flags += [*switches, *(() if policy == "sglang" else ("--enable-mixed-chunk",))]
        task |= {
            "flags": flags,
            "config": {"policy": policy, "strict": True, **(config or {})},
            "requests": requests,
            "num_ranks": num_ranks,
        }
        path = tmp_path / "task.json"
        path.write_text(json.dumps(task))
        with ThreadPoolExecutor(num_ranks) as threads:
            ran = [
                threads.submit(forks.run, RUN, str(rank), str(path), env=BINDING)
                for rank in range(num_ranks)
            ]
            done = [one.result() for one in ran]
        assert not any(one.returncode for one in done), "\n".join(
            one.stderr[-3000:] for one in done
        )
        told = [json.loads(one.stdout.splitlines()[-1]) for one in done]
        assert all(one["free"] == one["total"] for one in told)
        # Later stages do not count.
        assert task.get("num_stages") or len({one["iterations"] for one in told}) == 1
        return told

    return run


STOCK = {}


@pytest.fixture
def stock(group):
    """`stock(requests, ...)`: the tokens of stock, once for all tests."""

    def tokens(requests, **task):
        key = json.dumps([requests, task])
        if key not in STOCK:
            STOCK[key] = outputs(group(requests, policy="sglang", **task))
        return STOCK[key]

    return tokens


def outputs(told):
    return {rid: ids for one in told for rid, ids in one["outputs"].items()}


@pytest.mark.parametrize(
    ("policy", "num_ranks", "model"),
    [
        pytest.param("cosched", NUM_RANKS, MIXTURE, id="cosched"),
        pytest.param("hygen", 2, LATENT, id="hygen, latent attention", marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_as_stock_with_preemptions(group, stock, policy, num_ranks, model):
    """With 4 ranks two share the requests of each rank of DP attention."""
    requests = traffic(NUM_REQUESTS)
    expected = stock(requests, num_ranks=num_ranks, model=model)
    told = group(requests, policy=policy, num_ranks=num_ranks, model=model, stops=0.2)
    assert len(expected) == NUM_REQUESTS
    assert outputs(told) == expected
    sources = told[:: num_ranks // 2]
    for one in sources:
        state = one["state"]
        assert state["num_preemptions"] > 0 and state["offline_prefill_tokens"] > 0
        assert not state["num_safe_plans"] and not state["failures"]
        assert one["observed"] > 0


@pytest.mark.long
def test_pages_shared_by_both_classes_with_tensor_parallelism(group, stock):
    """Each rank parts and joins the same pages, without a word between them (BROS's testbed)."""
    (requests, _) = traffic(3 * NUM_REQUESTS, ranks=(0, 0))
    switches = ["--page-size", "16", "--max-total-tokens", "640"]
    expected = stock([requests], model=DENSE)
    told = group(
        [requests],
        policy="bros",
        model=DENSE,
        switches=switches,
        stops=0.2,
        config={"kv": {"bidirectional_pages": True}},
    )
    assert outputs(told) == expected and len(expected) == 3 * NUM_REQUESTS
    assert told[0]["shared_pages"] == told[1]["shared_pages"] > 0


def test_the_same_tokens_as_stock_with_drafts(group, stock, tmp_path):
    """The ranks prefill and decode in turns."""
    switches = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tmp_path)]
    for name, number in (("num-draft-tokens", 4), ("num-steps", 3), ("eagle-topk", 1)):
        switches += [f"--speculative-{name}", str(number)]
    requests = traffic(NUM_REQUESTS)
    expected = stock(requests, num_ranks=NUM_RANKS, model=MIXTURE)
    told = group(requests, switches=switches, stops=0.3)
    assert outputs(told) == expected
    assert any(one["state"]["num_preemptions"] for one in told)


def test_one_rank_has_nothing_to_do(group):
    requests = traffic(NUM_REQUESTS, ranks=(1,))
    told = group(requests)
    assert {rid: len(ids) for rid, ids in outputs(told).items()} == {
        rid: number for one in requests for rid, _, number, _, _ in one
    }
    assert [one["observed"] > 0 for one in told] == [False, True]


def test_aborts_and_pauses_of_offline_work(group):
    requests = traffic(NUM_REQUESTS)
    aborts = [[[rid, moment + 2] for rid, *_, moment in one[::3]] for one in requests]
    limits = [[[{"paused": True, "stop_running": True}, 5], [{}, 60]]] * 2
    told = group(requests, aborts=aborts, limits=limits)
    ends = {rid: end for one in told for rid, end in one["ends"].items()}
    assert len(ends) == NUM_REQUESTS
    gone = {rid for one in aborts for rid, _ in one}
    assert all(end == "length" for rid, end in ends.items() if rid not in gone)


def test_a_pipeline_generates_the_same_tokens_as_stock_with_preemptions(group):
    """There is memory for few requests: all stages must evict the same."""
    requests = traffic(NUM_REQUESTS, ranks=(0,))[:1]
    stages = {"model": DENSE, "num_stages": 2}
    expected = outputs(group(requests, policy="sglang", **stages)[:1])
    told = group(requests, stops=0.2, **stages)
    assert len(expected) == NUM_REQUESTS
    assert [outputs([one]) for one in told] == [expected] * 2  # all stages know the tokens
    state = told[0]["state"]
    assert state["num_preemptions"] > 0 and state["offline_prefill_tokens"] > 0
    assert not state["num_safe_plans"] and not state["failures"]
    assert state["kv"] is not None and told[0]["observed"] > 0
