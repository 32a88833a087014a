"""Memory of a server through batches of lines with images.

    python -m tests.server.images_memory [--lines 150] [--in-flight 128]

A tiny Qwen2.5-VL on a CPU, two batches of lines with an image of 256 tokens each. Prints one JSON
line per batch: resident memory of the server and of its scheduler, before, at most and after [MB].
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil

from cosched.config import ENV_VAR
from cosched.lab.demo_model import ensure_demo_model
from tests.batch.api import Api
from tests.media_models import image_part, make_vision_model
from tests.request_lines import chat
from tests.serving import start_server

SIDE = 28 * 16  # 256 tokens


def resident(root):
    """Process -> its resident memory [MB]."""
    found = Counter({"server": root.memory_info().rss >> 20})
    for child in root.children(recursive=True):
        if "scheduler" in " ".join(child.cmdline()):
            found["scheduler"] += child.memory_info().rss >> 20
    return dict(found)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=150)
    parser.add_argument("--in-flight", type=int, default=128, help="batches.media_in_flight")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_vision_model(Path(folder, "model"), ensure_demo_model(size="tiny"))
        batches = {"folder": str(Path(folder, "batches")), "media_in_flight": args.in_flight}
        with start_server(model, env={ENV_VAR: json.dumps({"batches": batches})}) as server:
            root, api = psutil.Process(server.process.pid), Api(server.url)
            for turn in range(2):
                before, most, ended = resident(root), Counter(), threading.Event()

                def watch(most=most, ended=ended):
                    while not ended.wait(0.2):
                        most |= Counter(resident(root))

                watcher = threading.Thread(target=watch)
                watcher.start()
                images = [image_part(1000 * turn + n, side=SIDE) for n in range(args.lines)]
                question = {"type": "text", "text": "What is this?"}
                lines = [
                    chat(f"c{n}", messages=[{"role": "user", "content": [image, question]}])
                    for n, image in enumerate(images)
                ]
                batch = api.create(lines, endpoint="/v1/chat/completions")
                done = api.wait(batch, timeout_s=600)
                ended.set()
                watcher.join()
                assert done.request_counts.completed == args.lines
                print(json.dumps({"before": before, "most": dict(most), "after": resident(root)}))


if __name__ == "__main__":
    main()
