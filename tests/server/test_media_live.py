"""A tiny Qwen2.5-VL and a tiny Qwen2-Audio over HTTP: chats and lines with images or sounds,
through SGLang's own processors."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from cosched.config import ENV_VAR
from tests.batch.api import Api
from tests.media_models import audio_part, image_part, make_audio_model, make_vision_model
from tests.request_lines import chat
from tests.serving import start_server

CHAT = "/v1/chat/completions"
LONG_S = 30
"""Of a sound: longer than a text may be."""


class Kind(NamedTuple):
    """name: in `usage`; tokens: of each image or sound; num_with: lines with one each, of which the
    last ones have what the first ones have; num_texts: lines without."""

    name: str
    make_model: Any
    part: Any
    tokens: list[int]
    num_with: int
    num_texts: int

    def messages(self, number):
        if number >= self.num_with:
            return [{"role": "user", "content": f"Tell me {number}"}]
        seed = number % len(self.tokens)
        question = {"type": "text", "text": "What is this?"}
        return [{"role": "user", "content": [self.part(seed, self.tokens[seed]), question]}]


IMAGES = Kind(
    name="image_tokens",
    make_model=make_vision_model,
    part=lambda seed, num_tokens: image_part(seed, side=int(28 * num_tokens**0.5)),
    tokens=[256 if seed % 3 == 0 else 16 for seed in range(15)],
    num_with=30,
    num_texts=10,
)
SOUNDS = Kind(
    name="audio_tokens",
    make_model=make_audio_model,
    part=lambda seed, num_tokens: audio_part(seed, num_tokens=num_tokens),
    tokens=[25 * LONG_S, *(10 + 15 * seed for seed in range(9))],
    num_with=15,
    num_texts=5,
)


@pytest.mark.server
@pytest.mark.long  # a server of its own; tests/engine/test_media.py has the encoder in iterations
@pytest.mark.parametrize("kind", [IMAGES, SOUNDS], ids=["images", "sounds"])
def test_lines_with_media_are_answered_as_chats_are(kind, tiny_model, forks, tmp_path):
    model = kind.make_model(tmp_path / "model", tiny_model)
    batches = {"folder": str(tmp_path / "batches"), "media_in_flight": 8}
    env = {ENV_VAR: json.dumps({"batches": batches})}
    with start_server(model, env=env, forks=forks) as server:
        api = Api(server.url)

        def ask(number):
            messages = kind.messages(number)
            reply = api.client.chat.completions.create(
                model="default", messages=messages, max_tokens=12, temperature=0
            )
            return reply.choices[0].message.content

        numbers = range(kind.num_with + kind.num_texts)
        lines = [chat(f"c{n}", messages=kind.messages(n), max_tokens=12) for n in numbers]
        batch = api.create(lines, endpoint=CHAT)
        api.wait(batch, "in_progress")
        beside = {number: ask(number) for number in (0, 7, kind.num_with + 1)}
        done = api.wait(batch)
        records = api.records(done.output_file_id)
        assert done.request_counts.completed == len(numbers), api.records(done.error_file_id)
        bodies = {record["custom_id"]: record["response"]["body"] for record in records}
        found = [bodies[f"c{number}"]["choices"][0]["message"]["content"] for number in numbers]
        [state] = server.states()
        alone = [ask(number) for number in numbers]
    assert found == alone and all(found[number] == text for number, text in beside.items())
    num_media = len(kind.tokens)
    assert found[num_media : kind.num_with] == found[: kind.num_with - num_media]
    assert len(set(found)) == num_media + kind.num_texts, "each of them and each text has its own"
    # Each once, also where it is in two lines and in a chat.
    assert state["encoded_tokens"] == sum(kind.tokens)
    usages = [bodies[f"c{number}"]["usage"] for number in range(num_media)]
    assert [usage["prompt_tokens_details"][kind.name] for usage in usages] == kind.tokens
    others = {usage["prompt_tokens"] - num for usage, num in zip(usages, kind.tokens, strict=True)}
    assert len(others) == 1, "they differ by no more than their images or sounds"
