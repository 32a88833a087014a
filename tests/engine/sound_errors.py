"""How well the times of iterations with sounds are predicted.

    python -m tests.engine.sound_errors [--requests 300] [--seed 0]

A tiny Qwen2-Audio in this process, on one thread: chats and lines, nearly all lines and a fifth of
the chats with a sound of 0.4 to 30 s. Times are CPU times, so that other processes do not change
them. The iterations are then given to three predictors in their order. The last line is JSON: of
each, the mean error of the predictions after the first 100 iterations, by kind [%].
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from cosched.config import ENV_VAR
from cosched.core.batch import BatchTotals
from cosched.lab.demo_model import ensure_demo_model
from cosched.predict.calibration import Calibrator
from cosched.versions import versions
from tests.engine.conftest import FLAGS, OFFLINE
from tests.media_models import make_audio_model, sound_item

LENGTHS = (10, 25, 50, 100, 200, 400, 750)  # tokens
HIDDEN = {"nothing": ("num_encoded", "num_encodings"), "tokens": ("num_encodings",), "both": ()}
"""What each predictor knows of the encoder -> what it is not told."""
FIRST = 100
SIZES = {
    "--max-total-tokens": "20000",
    "--max-running-requests": "16",
    "--chunked-prefill-size": "2048",
}


class CpuClock:
    def now_s(self):
        return time.process_time()

    def wait_until(self, time_s, is_over):
        return is_over()


def iterations(model, num_requests, rng):
    """Shapes and times [s] of the iterations in which all are served."""
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    from cosched.lab.local_engine import LocalEngine

    flags = [text for pair in (FLAGS | SIZES).items() for text in pair]
    flags += ["--enable-mixed-chunk", "--disable-overlap-schedule"]
    engine = LocalEngine(["--model-path", str(model), *flags])
    torch.set_num_threads(1)
    found = []
    observer = engine.scheduler.cosched_observer
    observer.use_virtual_clock(CpuClock())
    observer.add_listener(lambda each: found.append((each.shape, each.duration_s)))
    audio = json.loads((model / "config.json").read_text())["audio_token_index"]

    def submit(number):
        ids, media = [rng.randrange(20, 500) for _ in range(rng.randrange(20, 120))], None
        if number % 2 or rng.random() < 0.2:
            begin, num_tokens = len(ids), rng.choice(LENGTHS)
            ids += [audio] * num_tokens
            item = sound_item(number, begin, num_tokens=num_tokens, num_frames=3000)
            media = MultimodalProcessorOutput(mm_items=[item], audio_token_id=audio)
        engine.submit(
            f"r{number}",
            [*ids, 10, 11],
            max_new_tokens=rng.randrange(4, 40),
            priority=OFFLINE if number % 2 else 0,
            mm_inputs=media,
        )

    def on_iteration(number):
        if number % 3 == 0 and number < 3 * num_requests:
            submit(number // 3)

    engine.run_until_idle(on_iteration=on_iteration)
    engine.close()
    return found


def errors(found, hidden):
    """Kind of iteration -> mean error [%]."""
    predictor, by_kind = Calibrator(), defaultdict(list)
    for number, (shape, seconds) in enumerate(found):
        totals = BatchTotals.of(shape)
        for name in hidden:
            setattr(totals, name, 0)
        if number >= FIRST:
            kind = "sounds" if shape.encoded else "prefills" if shape.prefills else "decodes"
            by_kind[kind].append(abs(predictor.estimate_s(totals) / seconds - 1))
        predictor.observe(totals, seconds)
    by_kind["all"] = [error for each in by_kind.values() for error in each]
    return {kind: round(100 * sum(each) / len(each), 1) for kind, each in sorted(by_kind.items())}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ[ENV_VAR] = json.dumps({"policy": "cosched"})
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = make_audio_model(Path(folder, "model"), ensure_demo_model(size="tiny"))
        found = iterations(model, args.requests, random.Random(args.seed))
    result = {"seed": args.seed, "iterations": len(found), "versions": versions()}
    for known, hidden in HIDDEN.items():
        result[known] = errors(found, hidden)
        print(known, result[known])
    times = defaultdict(list)
    for shape, seconds in found:
        if len(shape.prefills) == 1 and shape.encoded:
            times[sum(shape.encoded)].append(1e3 * seconds)
    result["ms"] = {num: round(sum(each) / len(each), 1) for num, each in sorted(times.items())}
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
