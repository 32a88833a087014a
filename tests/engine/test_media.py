"""A tiny Qwen2.5-VL with random weights, on a CPU: a real encoder inside the iterations."""

import json

import torch

from cosched.core.request import Media
from tests.engine.conftest import OFFLINE, assert_drained, outputs
from tests.engine.tiny_models import randomize
from tests.vision_model import CONFIG

SIDE = 8  # patches
IMAGE_TOKENS = SIDE * SIDE // 4
HEAD = list(range(20, 60))
# Of each request: its images, by seed. The second and the third begin alike, up to an image.
LINES = {"one": [1], "other": [2], "both": [1, 2], "many": [3, 4, 5, 6], "text": []}


def image(seed, begin):
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    pixels = torch.randn(SIDE * SIDE, 1176, generator=torch.Generator().manual_seed(seed))
    grid = {"image_grid_thw": torch.tensor([[1, SIDE, SIDE]])}
    offsets = [(begin, begin + IMAGE_TOKENS - 1)]
    return MultimodalDataItem(
        modality=Modality.IMAGE, feature=pixels, model_specific_data=grid, offsets=offsets
    )


def prompt_with(seeds):
    """Token ids, and what SGLang's processor makes of the images."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    ids, items = [*HEAD], []
    for seed in seeds:
        items.append(image(seed, len(ids) + 1))
        ids += [3, *[5] * IMAGE_TOKENS, 4]
    ids += [10, 11, 12]
    if not items:
        return ids, None
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=2,
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.cat([item.image_grid_thw for item in items]),
    )
    return ids, MultimodalProcessorOutput(
        mm_items=items,
        input_ids=ids,
        im_token_id=5,
        mrope_positions=positions.squeeze(1),
        mrope_position_delta=delta,
    )


def serve(engine, lines=LINES):
    """The outputs, and the tokens that the encoder has computed."""
    model = engine.scheduler.tp_worker.model_runner.model
    encode, computed = type(model).get_image_feature, []

    def get_image_feature(items):
        computed.extend(last - first + 1 for item in items for first, last in item.offsets)
        return encode(model, items)

    model.get_image_feature = get_image_feature
    for number, (rid, seeds) in enumerate(lines.items()):
        ids, mm_inputs = prompt_with(seeds)
        priority = OFFLINE if number % 2 else 0
        engine.submit(rid, ids, max_new_tokens=6, priority=priority, mm_inputs=mm_inputs)
    engine.run_until_idle()
    assert_drained(engine)
    return outputs(engine), sum(computed)


def test_images_are_encoded_once_and_counted(make_engine, monkeypatch, tmp_path):
    """The same tokens as stock SGLang; lines with other images share only what is before them."""
    monkeypatch.setattr("sglang.srt.model_loader.loader.initialize_dummy_weights", randomize)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    served = {"model_path": tmp_path, "load_format": "dummy"}
    expected, _ = serve(make_engine(policy="sglang", mixed=False, **served))
    engine = make_engine(policy="cosched", **served)
    shapes, waiting = [], {}
    controller = engine.scheduler.cosched
    engine.scheduler.cosched_observer.add_listener(lambda it: shapes.append(it.shape))
    track = controller.waiting.append

    def append(req):
        track(req)
        waiting[req.rid] = req.cosched

    monkeypatch.setattr(controller.waiting, "append", append)
    found, computed = serve(engine)
    assert found == expected and len({*map(tuple, found.values())}) > 1
    num_encoded = sum(sum(shape.encoded) for shape in shapes)
    assert num_encoded == computed == 6 * IMAGE_TOKENS, "of six different images"
    assert waiting["both"].traits.media == (Media(41, 16), Media(59, 16))
    assert not waiting["text"].traits.media
    head = len(HEAD) + 1
    ids = {rid: request.token_ids for rid, request in waiting.items()}
    assert ids["one"][:head] == ids["other"][:head]
    assert ids["one"][head : head + IMAGE_TOKENS] != ids["other"][head : head + IMAGE_TOKENS]
    assert ids["one"][: head + IMAGE_TOKENS] == ids["both"][: head + IMAGE_TOKENS]
