"""The end-to-end measurement: what it asks, compares and writes, with servers that are none."""

import contextlib
import json
import os
import sys

import pytest

from cosched.lab.cost_models.specs import MODELS
from tests.fake_server import FakeServer, Reply
from tests.scripts import script

OURS = "cosched_shared_prefix"


def test_a_shape_is_a_model_without_weights(tmp_path):
    folder = script("gpu_end_to_end").write_model(tmp_path, "Llama-3.1-8B")
    config, spec = json.loads((folder / "config.json").read_text()), MODELS["Llama-3.1-8B"]
    shape = [config[f"num_{name}"] for name in ("hidden_layers", "key_value_heads")]
    assert shape == [spec.num_layers, spec.num_kv_heads] and config["head_dim"] == 128
    assert (folder / "tokenizer.json").exists() and not list(folder.glob("*.safetensors"))


@pytest.fixture
def fake_servers(monkeypatch):
    """(backend, model, configuration) of each started server. Its tokens follow from the prompt;
    servers of our backend get `wrong` replies wrong."""
    started = []

    @contextlib.asynccontextmanager
    async def serving(*, model_path, flags, log_path):
        backend = flags[flags.index("--attention-backend") + 1]
        config = json.loads(os.environ["COSCHED_CONFIG"])["shared_prefix"]
        started.append((backend, model_path, config))

        def reply(asked):
            ids, params = asked.body["input_ids"], asked.body["sampling_params"]
            assert params["temperature"] == 0 and params["ignore_eos"]
            tokens = [(sum(ids) + i) % 2000 for i in range(params["max_new_tokens"])]
            if backend == OURS and len(ids) % 100 in range(20, 20 + run.num_wrong):
                tokens[3] = -1
            return Reply.of({"output_ids": tokens})

        with FakeServer(reply) as server:
            yield server.base_url

    monkeypatch.setattr(script("gpu_end_to_end"), "serving", serving)
    return started


def run(monkeypatch, capsys, folder, *options):
    command = ["gpu_end_to_end", "--device", "cpu", "--only", "tokens", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, "--questions", "3", *options])
    script("gpu_end_to_end").main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


run.num_wrong = 0


def test_both_backends_are_asked_the_same(tmp_path, monkeypatch, capsys, fake_servers):
    result = run(monkeypatch, capsys, tmp_path, "--new-tokens", "8")
    (row,) = result["rows"]
    assert row["same"] == row["replies"] == 2 + 6 + 3 and not row["parted_at"]
    assert json.loads((tmp_path / "end_to_end.json").read_text()) == result
    assert "| tiny, float32 | 11 | 11 |" in (tmp_path / "end_to_end.md").read_text()
    (stock, model, config), (ours, other_model, _) = fake_servers
    assert (stock, ours, model) == ("torch_native", OURS, other_model)
    assert config["inner"] == "torch_native" and config["min_saved_tokens"] == 1


def test_replies_that_differ_fail_the_run(tmp_path, monkeypatch, capsys, fake_servers):
    monkeypatch.setattr(run, "num_wrong", 1)
    with pytest.raises(SystemExit, match=r"replies differ: \{'c0': 3\}"):
        run(monkeypatch, capsys, tmp_path)
    assert (tmp_path / "end_to_end.json").exists()
