"""A tiny Qwen2.5-VL and a tiny Qwen2-Audio with random weights, on a CPU: real encoders inside the
iterations."""

import json
from typing import Any, NamedTuple

import pytest
import torch

from cosched.core.request import Media
from tests.engine.conftest import OFFLINE, assert_drained, outputs
from tests.engine.tiny_models import randomize
from tests.media_models import AUDIO_CONFIG, CONFIG, sound_item

SIDE = 8  # patches
NUM_TOKENS = SIDE * SIDE // 4
"""Of an image or a sound."""
NUM_FRAMES = 200
"""Of a sound, most of which are silence that fills it up: four make a token."""
HEAD = list(range(20, 60))
# Of each request: its images, by seed. The second and the third begin alike, up to an image.
LINES = {"one": [1], "other": [2], "both": [1, 2], "many": [3, 4, 5, 6], "text": []}


def image(seed, begin):
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    pixels = torch.randn(SIDE * SIDE, 1176, generator=torch.Generator().manual_seed(seed))
    grid = {"image_grid_thw": torch.tensor([[1, SIDE, SIDE]])}
    offsets = [(begin, begin + NUM_TOKENS - 1)]
    return MultimodalDataItem(
        modality=Modality.IMAGE, feature=pixels, model_specific_data=grid, offsets=offsets
    )


def sound(seed, begin):
    return sound_item(seed, begin, num_tokens=NUM_TOKENS, num_frames=NUM_FRAMES)


def positions_of(ids, images):
    """In three dimensions, of Qwen2.5-VL."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.cat([image.image_grid_thw for image in images]),
    )
    return {"mrope_positions": positions.squeeze(1), "mrope_position_delta": delta}


class Kind(NamedTuple):
    """item: one of its images or sounds, by seed and place; encode: its method that computes them;
    fields: more that SGLang's processor gives."""

    config: dict[str, Any]
    item: Any
    encode: str
    fields: Any


IMAGES = Kind(CONFIG, image, "get_image_feature", positions_of)
SOUNDS = Kind(
    config=AUDIO_CONFIG
    | {"audio_config": AUDIO_CONFIG["audio_config"] | {"max_source_positions": NUM_FRAMES // 2}},
    item=sound,
    encode="get_audio_feature",
    fields=lambda ids, items: {"audio_token_id": 5},
)


def prompt_with(kind, seeds):
    """Token ids, and what SGLang's processor makes of the images or sounds."""
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    ids, items = [*HEAD], []
    for seed in seeds:
        items.append(kind.item(seed, len(ids) + 1))
        ids += [3, *[5] * NUM_TOKENS, 4]
    ids += [10, 11, 12]
    if not items:
        return ids, None
    fields = {"im_token_id": 5, **kind.fields(ids, items)}
    return ids, MultimodalProcessorOutput(mm_items=items, input_ids=ids, **fields)


def serve(engine, kind):
    """The outputs, and the tokens that the encoder has computed."""
    model = engine.scheduler.tp_worker.model_runner.model
    encode, computed = getattr(type(model), kind.encode), []

    def count_and_encode(items):
        computed.extend(last - first + 1 for item in items for first, last in item.offsets)
        return encode(model, items)

    setattr(model, kind.encode, count_and_encode)
    for number, (rid, seeds) in enumerate(LINES.items()):
        ids, mm_inputs = prompt_with(kind, seeds)
        priority = OFFLINE if number % 2 else 0
        engine.submit(rid, ids, max_new_tokens=6, priority=priority, mm_inputs=mm_inputs)
    engine.run_until_idle()
    assert_drained(engine)
    return outputs(engine), sum(computed)


@pytest.mark.parametrize("kind", [IMAGES, SOUNDS], ids=["images", "sounds"])
def test_media_are_encoded_once_and_counted(kind, make_engine, monkeypatch, tmp_path):
    """The same tokens as stock SGLang; lines with other media share only what is before them."""
    monkeypatch.setattr("sglang.srt.model_loader.loader.initialize_dummy_weights", randomize)
    (tmp_path / "config.json").write_text(json.dumps(kind.config))
    served = {"model_path": tmp_path, "load_format": "dummy"}
    expected, _ = serve(make_engine(policy="sglang", mixed=False, **served), kind)
    engine = make_engine(policy="cosched", **served)
    shapes, waiting = [], {}
    controller = engine.scheduler.cosched
    engine.scheduler.cosched_observer.add_listener(lambda it: shapes.append(it.shape))
    track = controller.waiting.append

    def append(req):
        track(req)
        waiting[req.rid] = req.cosched

    monkeypatch.setattr(controller.waiting, "append", append)
    found, computed = serve(engine, kind)
    assert found == expected and len({*map(tuple, found.values())}) > 1
    num_encoded = sum(sum(shape.encoded) for shape in shapes)
    assert num_encoded == computed == 6 * NUM_TOKENS, "of six that differ"
    assert waiting["both"].traits.media == (Media(41, 16), Media(59, 16))
    assert not waiting["text"].traits.media
    head = len(HEAD) + 1
    ids = {rid: request.token_ids for rid, request in waiting.items()}
    assert ids["one"][:head] == ids["other"][:head]
    assert ids["one"][head : head + NUM_TOKENS] != ids["other"][head : head + NUM_TOKENS]
    assert ids["one"][: head + NUM_TOKENS] == ids["both"][: head + NUM_TOKENS]
