"""What online requests would have alone, against what they have alone."""

from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest

from cosched.core.batch import BatchTotals
from cosched.core.caps import EngineCaps
from cosched.core.request import RequestClass
from cosched.engine import attach
from cosched.engine.features.isolated_watch import IsolatedWatch
from cosched.lab.simulation import run
from cosched.lab.simulation.run import config_of, execute
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.predict.calibration import Calibrator
from cosched.predict.isolated import IsolatedBaseline
from cosched.predict.tolerance import ToleranceConfig
from tests.factories import Linear
from tests.simulated import make_spec

EXACT = Linear(fixed_s=0.01, token_s=3e-5, longest_s=1e-7)
CAPPED = {
    "kv_tokens": 400_000,
    "chunk_tokens": 512,
    "max_prefill_tokens": 1024,
    "max_running_requests": 256,
}


class ExactTimes:
    """A device that takes just as long as is predicted of it."""

    graph_sizes = None

    def iteration_s(self, batch):
        return EXACT.predict_s(BatchTotals.of(batch))

    def describe(self):
        return {}


@pytest.mark.parametrize(
    ("machine", "rate"),
    [
        (CAPPED, 3.0),
        (CAPPED | {"overlap": False}, 3.0),
        (CAPPED | {"chunk_tokens": 2048}, 6.0),
    ],
)
def test_it_is_what_they_have_alone_where_times_are_predicted_exactly(monkeypatch, machine, rate):
    monkeypatch.setattr(run, "cost_model_of", lambda spec: ExactTimes())
    spec = make_spec(
        "s0",
        machine=machine | {"radix_cache": False},
        online=WorkloadSpec(name="azure-like", rate=rate),
        offline=None,
        duration_s=15.0,
    )
    machine, records = spec.machine, execute(spec).records
    ended = {r.rid: r for r in records if r.finish_s is not None}
    alone = IsolatedBaseline(
        max_chunk_tokens=machine.chunk_tokens,
        max_prefill_tokens=machine.max_prefill_tokens,
        max_running_requests=machine.max_running_requests,
        overlaps=machine.overlap,
    )
    arriving = sorted(records, key=lambda r: (r.arrival_s, r.rid))
    events = [(r.arrival_s, "came", r) for r in arriving]
    events += [(r.finish_s, "ended", r) for r in ended.values()]
    served = {}
    for at_s, what, record in sorted(events, key=lambda event: event[0]):
        alone.advance(at_s - 1e-9, EXACT.predict_s)
        if what == "came":
            num_prompt = record.num_prompt_tokens
            alone.arrived(record.rid, record.arrival_s, num_prompt=num_prompt)
        else:
            alone.ended(record.rid, record.num_output_tokens)
        served |= {one.rid: one for one in alone.pop_served()}
    alone.advance(20.0, EXACT.predict_s)
    served |= {one.rid: one for one in alone.pop_served()}
    assert served.keys() == ended.keys() and len(ended) > 20
    for rid, one in served.items():
        record = ended[rid]
        assert one.ttft_s == pytest.approx(record.first_token_s - record.arrival_s, rel=1e-9)
        if one.tpot_s is not None:
            gaps = record.num_output_tokens - 1
            taken_s = record.finish_s - record.first_token_s
            assert one.tpot_s == pytest.approx(taken_s / gaps, rel=1e-9)


SPEC = make_spec(
    "s0",
    machine=CAPPED | {"kv_tokens": 200_000, "chunk_tokens": 2048, "max_prefill_tokens": 16_384},
    online=WorkloadSpec(name="azure-like", rate=3.0),
    offline=WorkloadSpec(name="bros-offline", num_requests=2000),
    duration_s=15.0,
)
SHARE = 0.05


def test_what_is_promised_is_kept_and_is_not_without_the_promise(monkeypatch):
    monkeypatch.setattr(run, "cost_model_of", lambda spec: ExactTimes())
    monkeypatch.setattr(attach, "calibrator_of", lambda *arguments, **graphs: Calibrator(EXACT))
    beside = replace(SPEC, setting=setting_of("cosched"))
    promised = beside.configured(tolerance={"ttft": SHARE, "tpot": SHARE})
    alone, free, kept = (execute(spec) for spec in (SPEC, beside, promised))
    for name in ("ttft_s", "tpot_s"):
        had, took, keeps = (getattr(r.summary.online, name).mean for r in (alone, free, kept))
        assert keeps < (1 + SHARE + 0.01) * had, name
        assert took > (1 + 4 * SHARE) * had, name
    rates = [r.summary.offline.tokens_per_s for r in (free, kept)]
    assert 0 < rates[1] < rates[0]
    for result in (free, kept):
        ended = {r.rid for r in result.records if r.finish_s is not None}
        online = (r for r in alone.records if r.request_class is RequestClass.ONLINE)
        same = [r for r in online if r.rid in ended]
        state = result.cosched["alone"]
        for name in ("ttft", "tpot"):
            had = fmean(value for r in same if (value := getattr(r, f"{name}_s")) is not None)
            believed = state[name]["total_alone_s"] / state[name]["num"]
            if result is kept:
                assert believed == pytest.approx(had, rel=0.05), "as it would have been alone"
            else:  # of the slowest nothing is known until they end: these came last
                assert believed < (1 + SHARE) * had
            assert (state[name]["room"] is None) == (result is free)


@pytest.mark.parametrize("share", [None, SHARE])
def test_a_promise_waits_for_times_of_decodes_alone_and_a_figure_does_not(share):
    asked = []
    predictor = SimpleNamespace(is_known=False, knows_prefills=True, error=1.0)
    predictor.estimate_s = lambda totals: asked.append(totals) or 0.01
    watch = IsolatedWatch(
        ToleranceConfig(tpot=share),
        caps=EngineCaps(
            max_running_requests=8, page_size=1, max_chunk_tokens=512, max_prefill_tokens=1024
        ),
        overlaps=False,
        plans_ahead=False,
        predictor=predictor,
        num_cached=lambda tracked: 0,
    )
    chat = SimpleNamespace(request_class=RequestClass.ONLINE, rid="a", arrival_s=0.0)
    chat.num_prompt_tokens, chat.num_output_tokens = 10, 0
    watch.on_arrival(chat)
    watch.advance(0.05)
    assert bool(asked) == (share is None)


def test_runs_that_it_is_held_against_know_nothing_of_a_tolerance():
    spec = SPEC.configured(tolerance={"ttft": SHARE})
    assert config_of(spec).tolerance is None
    ours = replace(spec, setting=setting_of("cosched-nogapcap"))
    assert config_of(ours).tolerance == ToleranceConfig(ttft=SHARE)
