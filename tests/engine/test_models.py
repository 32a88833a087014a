"""Kinds of models beside plain ones: tiny configurations with random weights, served for real."""

import json

import pytest

from tests.engine.conftest import random_traffic, without_model
from tests.engine.test_speculative import prompts, submit
from tests.engine.tiny_models import INDEXED, LATENT, MIXTURE, SIZES, WINDOWS, randomize

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
    texts = prompts(10)
    stock = make_engine(policy="sglang", mixed=False, switches=switches, **served)
    expected = submit(stock, texts)
    assert len({tuple(ids) for ids in expected.values()}) == len(texts)
    forget_experts()
    engine = make_engine(policy="cosched", switches=switches, max_total_tokens=700, **served)
    assert submit(engine, texts) == expected
    assert engine.scheduler.cosched.kv is not None


def test_random_traffic_where_an_indexer_chooses_the_context(
    make_engine, forget_experts, monkeypatch, tmp_path
):
    """SGLang's scheduler, tree and pool with the keys of the indexer; nothing is computed."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    (tmp_path / "config.json").write_text(json.dumps(SIZES | INDEXED))
    served = {"model_path": tmp_path, "load_format": "dummy", "page_size": 64}
    engine = without_model(make_engine(policy="cosched", max_total_tokens=704, **served))
    pool = engine.scheduler.token_to_kv_pool_allocator.get_kvcache()
    assert type(pool).__name__ == "DSATokenToKVPool"
    random_traffic(engine, 1, most_tokens=25)
    assert engine.scheduler.cosched.kv is not None
