"""Classifiers: the lines of their batches."""

from __future__ import annotations

import json
import shutil

import httpx
import openai
import pytest

from tests.batch.api import Api
from tests.request_lines import line
from tests.serving import start_server

URL = "/v1/classify"


@pytest.mark.server
@pytest.mark.long  # a server of its own; tests/patches/test_openai_endpoints.py has the endpoints
def test_a_classifier_classifies_the_lines_of_a_batch(tiny_model, forks, tmp_path):
    labels = {"0": "safe", "1": "unsafe", "2": "unclear"}
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    (model / "config.json").write_text(json.dumps(config))
    flags = ("--load-format", "dummy", "--cosched-batches", str(tmp_path / "batches"))
    with start_server(model, *flags, forks=forks) as server:
        api = Api(server.url)
        lines = [line(f"c{n}", URL, model="default", input=f"text {n}") for n in range(8)]
        lines.append(line("two", URL, model="default", input=["one", "other"]))
        done = api.wait(api.create(lines, endpoint=URL))
        assert done.request_counts.completed == 9, api.records(done.error_file_id)
        for record in api.records(done.output_file_id):
            found = record["response"]["body"]["data"]
            assert {one["label"] for one in found} <= set(labels.values())
            assert all(one["num_classes"] == 3 for one in found)
        assert done.usage.input_tokens and not done.usage.output_tokens
        with pytest.raises(openai.BadRequestError, match="or a classifier on /v1/classify"):
            api.start(done.input_file_id, endpoint="/v1/moderations")
        reply = httpx.post(f"{server.url}{URL}", json={"model": "default", "input": "a"})
        assert reply.headers["x-cosched-class"] == "online"
