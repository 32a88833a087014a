"""Memory too small for what runs: stops must not feed on each other (SGLang issue 26248)."""

import random
from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import Slo
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of


@pytest.fixture
def requests(tmp_path):
    """Writes requests of given lengths, with arrivals or all at once; returns the file's name."""

    def write(name, rows):
        timed = len(rows[0]) == 3
        header = "arrived_at," * timed + "num_prefill_tokens,num_decode_tokens\n"
        path = tmp_path / f"{name}.csv"
        path.write_text(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
        return WorkloadSpec(name=str(path))

    return write


def make_spec(kv_tokens, **changes):
    return RunSpec(
        setting=setting_of("hygen"),
        machine=Machine(
            kv_tokens=kv_tokens,
            chunk_tokens=1024,
            max_running_requests=32,
            # SGLang's estimate of the output to come, far too low: memory runs out for certain.
            schedule_conservativeness=0.3,
        ),
        cost=CostSpec(name="roofline"),
        **changes,
    )


def test_decoding_recovers_after_long_contexts_were_stopped(requests):
    rng = random.Random(0)
    rows = [(rng.randint(2700, 3300), rng.randint(550, 650)) for _ in range(8)]
    spec = make_spec(32_000, offline=requests("long", rows), duration_s=200.0)
    enough = execute(spec)
    short = execute(replace(spec, machine=replace(spec.machine, kv_tokens=20_000)))
    summary = short.to_dict()["summary"]["offline"]
    assert all(record.is_finished for record in short.records)
    assert 1 <= summary["num_preemptions"] <= len(rows)
    # A third of the memory is missing, so a third of the requests must wait.
    assert short.end_s <= 1.8 * enough.end_s
    assert summary["num_recomputed_tokens"] <= 0.1 * sum(map(sum, rows))


def test_computing_anew_is_bounded(requests):
    """Bursts push out offline contexts again and again."""
    rng = random.Random(0)
    offline = requests("off", [(rng.randint(3500, 4500), rng.randint(300, 600)) for _ in range(60)])
    bursts = [
        (round(burst * 1.5, 3), rng.randint(2000, 3000), rng.randint(5, 15))
        for burst in range(20)
        for _ in range(3)
    ]
    num_recomputed = {}
    for share in (0.02, 1.0):
        result = execute(
            make_spec(
                13_000,
                online=requests("on", bursts),
                offline=offline,
                duration_s=30.0,
                slo=Slo(ttft_s=1.0, tpot_s=0.05),
                config=(("kv", {"eviction": "lru", "recompute_share": share}),),
            )
        )
        summary = result.to_dict()["summary"]["offline"]
        assert summary["num_finished"] >= 2, "it goes on all the same"
        num_recomputed[share] = summary["num_recomputed_tokens"]
    assert num_recomputed[1.0] > 50_000, "or the test shows nothing"
    assert num_recomputed[0.02] < num_recomputed[1.0] / 3
