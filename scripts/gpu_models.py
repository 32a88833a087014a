#!/usr/bin/env python3
"""Kinds of models and flags on real servers: the replies of a policy equal stock SGLang's.

    scripts/gpu_models.py --out DIR                        # on a GPU, some ten minutes a kind
    scripts/gpu_models.py --out DIR states windows --device cpu

Kinds: eagle, ngram (drafts), states (Qwen3-Next), windows (Mellum), latent (DeepSeek-V3), and
attention_dp (two ranks of DP attention, which need two GPUs). The models are tiny, in float32, with
random weights that make the context matter. Stock serves the prompts one after the other, and then
as the policies get them: offline requests at once and chats one after the other. Policies have
memory for a part of them, so that they preempt. Kernels of a GPU round by the batch, so stock may
differ there between its two runs: a policy that differs in more replies, by twice and a twentieth
of all, ends with 1. `states` needs a GPU and bfloat16; tests/engine/test_states.py is for a CPU.

DIR gets the servers' logs and models.json. The last line is JSON. Options of SGLang come behind
`--`, for all servers. On a GPU the servers need SGLang's compiled sgl_kernel, whose norms know no
float32: SGLang computes them and activations in torch here, and Triton multiplies without TF32.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from cosched.batch.jsonl.server import serving
from cosched.config import Config, configured
from cosched.errors import CoschedError
from cosched.lab.demo_model import ensure_demo_model
from cosched.versions import versions
from cosched.wire import OFFLINE_PRIORITY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.engine.tiny_models import HYBRID, LATENT, MIXTURE, SIZES, WINDOWS

VOCAB_SIZE = 2000
COMMON = ("--mem-fraction-static", "0.2", "--max-running-requests", "12")
SMALL = ("--max-total-tokens", "2500")
DRAFTS = ("--speculative-num-draft-tokens", "4")
SIZED = {**SIZES, "vocab_size": VOCAB_SIZE, "initializer_range": 0.15, "dtype": "float32"}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "states": {
        **HYBRID,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_expert_intermediate_size": 32,
        **SIZED,
    },
    "windows": WINDOWS | SIZED,
    "latent": {**SIZED, **LATENT},
    "attention_dp": MIXTURE | SIZED,
}
FLAGS: Mapping[str, Sequence[str]] = {
    "eagle": (
        *("--speculative-algorithm", "EAGLE", *DRAFTS, "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-draft-model-path", "{model}"),
    ),
    "ngram": ("--speculative-algorithm", "NGRAM", *DRAFTS),
    "attention_dp": ("--tp", "2", "--dp", "2", "--enable-dp-attention"),
}
KINDS = tuple(dict.fromkeys((*FLAGS, *MODELS)))


def write_model(folder: Path, kind: str) -> Path:
    """The demo model, or random weights of another architecture with its tokenizer."""
    tiny = ensure_demo_model(size="tiny", dtype="float32")
    if kind not in MODELS:
        return tiny
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(MODELS[kind])
    torch.manual_seed(7)
    config = AutoConfig.for_model(**fields)
    target = folder / kind
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    path = target / "config.json"  # SGLang reads fields that transformers drops
    path.write_text(json.dumps({**fields, **json.loads(path.read_text())}))
    for file in tiny.glob("*token*"):
        shutil.copy(file, target)
    return target


def prompts(seed: int, number: int) -> list[list[int]]:
    """Half of them share one of four heads."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(10, VOCAB_SIZE, 150).tolist() for _ in range(4)]
    return [
        (heads[index % 4] if index % 2 else [])
        + rng.integers(10, VOCAB_SIZE, int(rng.integers(20, 200))).tolist()
        for index in range(number)
    ]


async def replies(base_url: str, asked: Sequence[list[int]], *, at_once: int) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=base_url, timeout=1800.0, trust_env=False) as client:
        turn = asyncio.Semaphore(at_once)

        async def ask(index: int) -> list[int]:
            body = {
                "input_ids": asked[index],
                "priority": OFFLINE_PRIORITY if index % 3 else 0,
                "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
            }
            if at_once > 1 and not index % 3:
                await asyncio.sleep(0.05 * index)  # chats come while offline work runs
            async with turn:
                response = await client.post("/generate", json=body)
            if response.status_code != 200:
                raise CoschedError(f"/generate answers {response.status_code}: {response.text}")
            ids: list[int] = response.json()["output_ids"]
            return ids

        return await asyncio.gather(*map(ask, range(len(asked))))


async def compare(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model = write_model(args.out, kind)
    backend = "triton" if args.device == "cuda" else "torch_native"
    dtype = "bfloat16" if kind == "states" else "float32"
    flags = ["--attention-backend", backend, "--dtype", dtype, *COMMON, *args.flags]
    if args.device == "cpu":
        flags += ["--device", "cpu"]
    elif kind in MODELS:  # experts in torch leave the device, which a CUDA graph cannot
        flags += ["--cuda-graph-backend-decode", "disabled"]
    own = [flag.format(model=model) for flag in FLAGS.get(kind, ())]
    asked = prompts(args.seed, args.requests)
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for name in ("alone", "sglang", *args.policy):
        policy = "sglang" if name == "alone" else name
        is_stock = policy == "sglang"
        # Drafts do not change what stock generates, so it goes without.
        of_kind = [] if is_stock and kind in ("eagle", "ngram") else own
        memory = () if is_stock else SMALL
        with configured(Config(policy=policy, strict=True)):
            server = serving(
                model_path=str(model),
                flags=[*flags, *memory, *of_kind],
                log_path=args.out / f"{kind}-{name}.log",
            )
            async with server as base_url:
                at_once = 1 if name == "alone" else len(asked)
                found = await replies(base_url, asked, at_once=at_once)
                async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
                    info = (await client.get(f"{base_url}/get_server_info")).json()
        if name == "alone":
            expected = found
            continue
        row = {
            "kind": kind,
            "policy": policy,
            "replies": len(asked),
            "different": [i for i in range(len(asked)) if found[i] != expected[i]],
        }
        if not is_stock:
            states = [state["cosched"] for state in info["internal_states"]]
            row |= {
                "preemptions": sum(state["num_preemptions"] for state in states),
                "tokens_per_decode": states[0]["tokens_per_decode"],
                "engine_refusals": sum(state["num_engine_refusals"] for state in states),
            }
            most = 2 * len(rows[0]["different"]) + len(asked) // 20
            row["is_wrong"] = len(row["different"]) > (most if rows[0]["different"] else 0)
        rows.append(row)
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS) + " (all)")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--policy", nargs="+", default=["cosched", "hygen"])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    args.flags = flags.split()
    unknown = set(args.kinds) - set(KINDS)
    if unknown:
        parser.error(f"unknown kind {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda":
        os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    rows: list[dict[str, Any]] = []
    for kind in args.kinds or KINDS:
        rows += asyncio.run(compare(kind, args))
    result = {"rows": rows, "device": args.device, "seed": args.seed, "versions": versions()}
    (args.out / "models.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 1 if any(row.get("is_wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
