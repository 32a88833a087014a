"""A prefill and a decode server of PD disaggregation on CPUs, with real transfers over TCP.

    pip install mooncake-transfer-engine nvidia-cuda-runtime-cu12     # and the system's libibverbs
    python -m tests.disaggregation --requests 500 --kv-tokens 2500 --tp 2

Starts both with cosched and then with SGLang's own scheduling, sends the same greedy requests of
both classes to each, 40 at a time, and compares latencies by class and all replies. SGLang's
code of this role expects CUDA where it needs none; `STAND_INS` is loaded into each process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

from cosched.batch.jsonl.server import free_port
from cosched.lab.demo_model import ensure_demo_model
from tests.serving import SEARCH_PATH, start_server

STAND_INS = """
import sys
if "compile" not in sys.orig_argv:
    import torch

    class Event:
        def __init__(self, *args, **options): pass
        def record(self, *args): pass
        def wait(self, *args): pass
        def synchronize(self): pass
        def query(self): return True

    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda *args: None
"""
DRIVER = "libcuda.so.1"
LIBRARIES = "nvidia/cuda_runtime/lib"


def make_driver(folder: Path) -> None:
    """A library with the functions of CUDA's driver that Mooncake names, all of which fail."""
    package = Path(find_spec("mooncake").origin).parent
    libraries = [*package.glob("*.so*"), *package.parent.glob("mooncake_transfer_engine.libs/*")]
    listed = subprocess.run(["nm", "-D", *map(str, libraries)], capture_output=True, text=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    code = "".join(f"int {name}() {{ return 100; }}\n" for name in sorted(names) if is_driver(name))
    (folder / "driver.c").write_text(code)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", DRIVER, "driver.c"]
    subprocess.run(command, cwd=folder, check=True)


def is_driver(name: str) -> bool:
    return name.startswith("cu") and name[2:3].isupper()


@contextmanager
def two_servers(policy: str, chosen: argparse.Namespace) -> Iterator[tuple[list[str], int]]:
    """The URLs of the prefill and of the decode server, and the port at which they meet."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        make_driver(Path(name))
        (Path(name) / "sitecustomize.py").write_text(STAND_INS)
        runtime = distribution("nvidia-cuda-runtime-cu12").locate_file(LIBRARIES)
        env = {
            "PYTHONPATH": f"{name}{os.pathsep}{SEARCH_PATH}",
            "LD_LIBRARY_PATH": f"{name}:{runtime}",
            "MOONCAKE_PROTOCOL": "tcp",
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        }
        meeting = free_port()
        flags = [
            *("--cosched-policy", policy, "--tp", str(chosen.tp)),
            *("--max-total-tokens", str(chosen.kv_tokens), "--max-running-requests", "16"),
            *("--chunked-prefill-size", "256", "--disaggregation-transfer-backend", "mooncake"),
            *("--disaggregation-bootstrap-port", str(meeting)),
        ]
        roles = {
            "prefill": [],
            "decode": ["--disaggregation-decode-retraction-backup", "cpu_tensor"],
        }
        model = Path(ensure_demo_model(size="tiny", dtype="float32"))
        urls = []
        for role, its_flags in roles.items():
            its_flags = [*flags, "--disaggregation-mode", role, *its_flags]
            urls.append(stack.enter_context(start_server(model, *its_flags, env=env)).url)
        yield urls, meeting


def requests(number: int) -> list[dict[str, Any]]:
    """Two of three are offline; six heads are shared."""
    draw = random.Random(5)
    words = "the of a in to is was for on that with as by at from it an be are this".split()

    def text(num: int) -> str:
        return " ".join(draw.choice(words) for _ in range(num))

    heads = [text(draw.choice((0, 60, 150))) for _ in range(6)]
    return [
        {
            "text": f"{draw.choice(heads)} {text(draw.randrange(3, 120))}",
            "sampling_params": {"max_new_tokens": draw.randrange(2, 40), "temperature": 0},
            "priority": -1 if n % 3 else 0,
        }
        for n in range(number)
    ]


async def answers(urls: list[str], meeting: int, bodies: list[dict[str, Any]]) -> list[str]:
    took: dict[str, list[float]] = {"online": [], "offline": []}
    at_once = asyncio.Semaphore(40)

    async def answer(room: int, body: dict[str, Any]) -> str:
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": meeting, "bootstrap_room": room}
        async with at_once:
            began = time.monotonic()
            posts = [client.post(f"{url}/generate", json=body | place) for url in urls]
            for reply in (replies := await asyncio.gather(*posts)):
                reply.raise_for_status()
            took["offline" if body["priority"] else "online"].append(time.monotonic() - began)
        return str(replies[1].json()["text"])

    began = time.monotonic()
    async with httpx.AsyncClient(timeout=600) as client:
        texts = await asyncio.gather(*(answer(n, body) for n, body in enumerate(bodies, 1)))
    for name, seconds in took.items():
        cuts = quantiles(seconds, n=100)
        print(f"  {name}: p50 {cuts[49]:.2f} s, p90 {cuts[89]:.2f} s, p99 {cuts[98]:.2f} s")
    print(f"  all: {time.monotonic() - began:.1f} s")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="PD disaggregation on CPUs")
    for name, default in (("requests", 300), ("kv-tokens", 2500), ("tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    bodies, found = requests(chosen.requests), []
    for policy in ("cosched", "sglang"):
        with two_servers(policy, chosen) as (urls, meeting):
            print(policy)
            found.append(asyncio.run(answers(urls, meeting, bodies)))
    num_other = sum(one != other for one, other in zip(*found, strict=True))
    print(f"{num_other} of {len(bodies)} replies differ")


if __name__ == "__main__":
    main()
