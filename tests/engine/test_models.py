"""Kinds of models beside plain ones: tiny configurations with random weights, served for real."""

import json

import pytest

from tests.engine.test_speculative import prompts, submit
from tests.engine.tiny_models import LATENT, MIXTURE, SIZES, WINDOWS, randomize

ONE_POOL = ("--disable-hybrid-swa-memory",)


@pytest.mark.parametrize(
    ("model", "switches"),
    [
        pytest.param(MIXTURE, (), id="mixture of experts"),
        pytest.param(WINDOWS, ONE_POOL, id="sliding windows in one pool"),
        pytest.param(LATENT, (), id="latent attention"),
    ],
)
def test_the_same_tokens_as_stock(
    make_engine, forget_experts, monkeypatch, tmp_path, model, switches
):
    monkeypatch.setattr("sglang.srt.model_loader.loader.initialize_dummy_weights", randomize)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | model))
    served = {"model_path": tmp_path, "load_format": "dummy"}
    texts = prompts(16)
    stock = make_engine(policy="sglang", mixed=False, switches=switches, **served)
    expected = submit(stock, texts)
    assert len({tuple(ids) for ids in expected.values()}) == len(texts)
    forget_experts()
    engine = make_engine(policy="cosched", switches=switches, max_total_tokens=700, **served)
    assert submit(engine, texts) == expected
    assert engine.scheduler.cosched.kv is not None
