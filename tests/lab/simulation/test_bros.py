"""What the evaluation of BROS needs of the simulator: waves, vLLM as it was run, its policies."""

from itertools import pairwise

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass, Slo
from cosched.lab.cost_models.specs import model_spec
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.clients import WaveClient
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, engine_flags, execute
from cosched.lab.simulation.setting import setting_of
from cosched_traces.catalogue import load_workload


def make_spec(name, **changes):
    return RunSpec(
        setting=setting_of(name),
        machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
        online=WorkloadSpec(name="sharegpt-bros", rate=4.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60, wave=20),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=0.4, tpot_s=0.2),
        duration_s=changes.pop("duration_s", 8.0),
        **changes,
    )


def ended(rid):
    return RequestRecord(
        rid=rid,
        request_class=RequestClass.OFFLINE,
        arrival_s=0.0,
        num_prompt_tokens=1,
        num_output_tokens=0,
        finish_s=1.0,
    )


def test_the_next_wave_is_sent_when_all_of_the_last_have_ended():
    requests = load_workload("bros-offline", seed=0, num_requests=7).requests
    client = WaveClient(requests, size=3)
    sent = []
    for number in range(3):
        wave = [arrival.rid for arrival in client.due(float(number))]
        assert not list(client.due(number + 0.5))
        for rid in wave[:-1]:
            client.on_finish(ended(rid))
            assert not list(client.due(number + 0.6))
        client.on_finish(ended("somebody else's"))
        assert not list(client.due(number + 0.7))
        client.on_finish(ended(wave[-1]))
        sent.append(len(wave))
    assert sent == [3, 3, 1] and not list(client.due(9.0))


@pytest.mark.parametrize("name", ["bros", "bros-rr", "vllm-like"])
def test_waves_do_not_overlap_and_both_classes_get_on(name):
    result = execute(make_spec(name))
    offline = [r for r in result.records if r.request_class is RequestClass.OFFLINE]
    waves = sorted({r.arrival_s for r in offline})
    assert len(waves) >= 2
    for earlier, later in pairwise(waves):
        last_s = [r.finish_s for r in offline if r.arrival_s == earlier]
        assert None not in last_s and max(last_s) <= later
    assert result.summary.online.num_finished > 5
    # Most replies of seconds are longer than one gap.
    assert result.summary.online.attainment.tbt.num_met > 100


def test_stock_is_run_as_bros_ran_vllm():
    flags = " ".join(engine_flags(make_spec("vllm-like")))
    for flag in ("--page-size 16", "--chunked-prefill-size -1", "--disable-radix-cache"):
        assert flag in flags
    assert "--enable-mixed-chunk" not in flags


@pytest.mark.parametrize("name", ["OPT-30B", "Llama-33B", "OPT-175B"])
def test_models_are_as_large_as_their_names_say(name):
    billions = int(name.split("-")[1].removesuffix("B"))
    assert model_spec(name).weight_bytes() / 2 == pytest.approx(billions * 1e9, rel=0.02)
