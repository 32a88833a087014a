"""A tiny Qwen2.5-VL over HTTP: chats and lines with images, through SGLang's own processor."""

from __future__ import annotations

import json

import pytest

from cosched.config import ENV_VAR
from tests.batch.api import Api
from tests.request_lines import chat
from tests.serving import start_server
from tests.vision_model import image_part, make_vision_model

CHAT = "/v1/chat/completions"
NUM_WITH_IMAGE, NUM_IMAGES, NUM_TEXTS = 30, 15, 10
TOKENS = [256 if seed % 3 == 0 else 16 for seed in range(NUM_IMAGES)]
"""Of each image."""


def messages(number):
    """The first lines have an image each, the second half of them those of the first half."""
    if number >= NUM_WITH_IMAGE:
        return [{"role": "user", "content": f"Tell me {number}"}]
    seed = number % NUM_IMAGES
    side = int(28 * TOKENS[seed] ** 0.5)
    question = {"type": "text", "text": "What is this?"}
    return [{"role": "user", "content": [image_part(seed, side=side), question]}]


@pytest.mark.server
@pytest.mark.long  # a server of its own; tests/engine/test_media.py has the encoder in iterations
def test_lines_with_images_are_answered_as_chats_are(tiny_model, forks, tmp_path):
    model = make_vision_model(tmp_path / "model", tiny_model)
    batches = {"folder": str(tmp_path / "batches"), "media_in_flight": 8}
    env = {ENV_VAR: json.dumps({"batches": batches})}
    with start_server(model, env=env, forks=forks) as server:
        api = Api(server.url)

        def ask(number):
            reply = api.client.chat.completions.create(
                model="default", messages=messages(number), max_tokens=12, temperature=0
            )
            return reply.choices[0].message.content

        numbers = range(NUM_WITH_IMAGE + NUM_TEXTS)
        lines = [chat(f"c{n}", messages=messages(n), max_tokens=12) for n in numbers]
        batch = api.create(lines, endpoint=CHAT)
        api.wait(batch, "in_progress")
        beside = {number: ask(number) for number in (0, 7, NUM_WITH_IMAGE + 1)}
        done = api.wait(batch)
        records = api.records(done.output_file_id)
        assert done.request_counts.completed == len(numbers), api.records(done.error_file_id)
        bodies = {record["custom_id"]: record["response"]["body"] for record in records}
        found = [bodies[f"c{number}"]["choices"][0]["message"]["content"] for number in numbers]
        [state] = server.states()
        alone = [ask(number) for number in numbers]
    assert found == alone and all(found[number] == text for number, text in beside.items())
    assert found[:NUM_IMAGES] == found[NUM_IMAGES:NUM_WITH_IMAGE]
    assert len(set(found)) == NUM_IMAGES + NUM_TEXTS, "each image and each text has its own"
    # Each image once, also where it is in two lines and in a chat.
    assert state["encoded_tokens"] == sum(TOKENS)
    lengths = {bodies[f"c{number}"]["usage"]["prompt_tokens"] for number in range(NUM_IMAGES)}
    assert max(lengths) - min(lengths) == max(TOKENS) - min(TOKENS)
