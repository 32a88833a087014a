#!/usr/bin/env python3
"""Real servers with and without `cosched_shared_prefix`: the same tokens, and how much faster.

    scripts/gpu_end_to_end.py --out DIR                          # on a GPU, some ten minutes
    scripts/gpu_end_to_end.py --out DIR --picker picker.json     # of scripts/gpu_profile
    scripts/gpu_end_to_end.py --out DIR --only load --backend triton --policy sglang cosched
    scripts/gpu_end_to_end.py --out DIR --device cpu             # minutes, tiny, without speed

1. *tokens*: questions about documents beside chats, in float32 on a tiny model, sent at once to a
   server of stock attention and to one of ours: every reply must be the same, or it ends with 1.
2. *load*: a model of --shape with dummy weights, in bfloat16. Chats arrive as in --online, and
   --offline work is there from the start; one server after the other, each fresh, for each policy
   and backend. Offline tokens/s, TTFT and TPOT of the chats. Dummy weights give logits that lie
   close together, so the tokens of two backends in bfloat16 diverge sooner or later; the number of
   equal replies is reported only.

DIR gets the servers' logs, end_to_end.json and end_to_end.md (a table for docs/results).
Options of SGLang come behind `--`, for all servers. On a GPU the servers need SGLang and its
compiled sgl_kernel: the stand-in that cosched puts in its place computes nothing. --stock is
Triton's backend, also inside ours, so that both compute the rest alike. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import torch

from cosched.batch.jsonl.server import serving
from cosched.config import Config, SharedPrefixConfig, configured
from cosched.core.wire import OFFLINE_PRIORITY
from cosched.errors import CoschedError
from cosched.lab.benchmark.own_server import OwnServers, leave_a_core_free
from cosched.lab.cost_models.specs import MODELS
from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.versions import versions

OURS = "cosched_shared_prefix"
VOCAB_SIZE = 2000
TINY = ("--dtype", "float32", "--max-total-tokens", "20000", "--mem-fraction-static", "0.2")


def write_model(folder: Path, name: str) -> Path:
    """A model of this shape without weights, with the tokenizer of the demo model. `tiny`: the demo
    model itself, weights and all."""
    tiny = ensure_demo_model(size="tiny", dtype="float32")
    if name == "tiny":
        return tiny
    spec = MODELS[name]
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((tiny / "config.json").read_text()) | {
        "dtype": "bfloat16",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": 131_072,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def prompts(seed: int, *, length: int, documents: int, questions: int) -> dict[str, list[int]]:
    """Rid -> token ids: `d*` documents, `q*` questions about them, some with a further common
    prefix, and `c*` chats."""
    rng = np.random.default_rng(seed)

    def some(n: int) -> list[int]:
        ids: list[int] = rng.integers(10, VOCAB_SIZE, n).tolist()
        return ids

    texts = {f"d{i}": some(length) for i in range(documents)}
    alike = [some(length // 4) for _ in range(2)]
    found = dict(texts)
    for index in range(documents * questions):
        head = texts[f"d{index % documents}"] + (alike[index % 2] if index % 3 else [])
        found[f"q{index}"] = head + some(12)
    found |= {f"c{i}": some(20 + 7 * i) for i in range(questions)}
    return found


async def replies(base_url: str, asked: dict[str, list[int]], num_new: int) -> dict[str, list[int]]:
    """Greedy replies: the documents first, so that they are cached, then all others at once."""
    async with httpx.AsyncClient(base_url=base_url, timeout=600.0, trust_env=False) as client:

        async def ask(rid: str) -> tuple[str, list[int]]:
            body = {
                "input_ids": asked[rid],
                "priority": 0 if rid.startswith("c") else OFFLINE_PRIORITY,
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": num_new,
                    "ignore_eos": True,
                },
            }
            response = await client.post("/generate", json=body)
            if response.status_code != 200:
                raise CoschedError(f"/generate answers {response.status_code}: {response.text}")
            return rid, response.json()["output_ids"]

        first = [rid for rid in asked if rid.startswith("d")]
        rest = [rid for rid in asked if rid not in first]
        found = dict(await asyncio.gather(*map(ask, first)))
        return found | dict(await asyncio.gather(*map(ask, rest)))


def compared(one: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, Any]:
    """How far two servers' replies are alike."""
    same = [rid for rid in one if one[rid] == other[rid]]
    parted = {
        rid: next(i for i, (a, b) in enumerate(zip(one[rid], other[rid], strict=True)) if a != b)
        for rid in one
        if rid not in same
    }
    return {"replies": len(one), "same": len(same), "parted_at": parted}


class Servers:
    """How the servers are started: `name` is an attention backend."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        stock = args.stock or ("triton" if args.device == "cuda" else "torch_native")
        self.names = (stock, OURS)
        self.loaded = tuple(args.backend or self.names)
        # Without a picker's file a CPU would share nothing.
        least = 1 if args.device == "cpu" else None
        picker = None if args.picker is None else str(args.picker.resolve())
        self.shared = SharedPrefixConfig(inner=stock, min_saved_tokens=least, device_model=picker)

    def flags(self, name: str, *flags: str) -> list[str]:
        device = ["--device", "cpu"] if self.args.device == "cpu" else []
        return ["--attention-backend", name, *device, *flags, *self.args.flags]

    async def tokens(self, model: Path, flags: Sequence[str], *, length: int) -> dict[str, Any]:
        """Both servers' replies to the same prompts, side by side."""
        args = self.args
        asked = prompts(args.seed, length=length, documents=2, questions=args.questions)
        found = []
        for name in self.names:
            log_path = args.out / f"tokens-{model.name}-{name}.log"
            # Every group that there is, the picker aside: it is the kernels that are compared.
            shared = msgspec.structs.replace(self.shared, min_saved_tokens=1, device_model=None)
            with configured(Config(policy=args.policy[0], strict=True, shared_prefix=shared)):
                server = serving(
                    model_path=str(model), flags=self.flags(name, *flags), log_path=log_path
                )
                async with server as base_url:
                    found.append(await replies(base_url, asked, args.new_tokens))
        return {"step": "tokens", "model": model.name, **compared(*found)}

    async def load(
        self, policy: str, name: str, model: Path, flags: Sequence[str]
    ) -> dict[str, Any]:
        args = self.args
        spec = RunSpec(
            setting=setting_of(policy),
            online=WorkloadSpec(name=args.online, rate=args.online_rate),
            offline=WorkloadSpec(name=args.offline, num_requests=args.offline_requests),
            duration_s=args.duration,
            seed=args.seed,
            data_dir=args.data_dir,
        ).configured(shared_prefix=msgspec.to_builtins(self.shared))
        servers = OwnServers(
            model_path=str(model), flags=self.flags(name, *flags), vocab_size=VOCAB_SIZE
        )
        run = await servers.run(spec, log_path=args.out / f"load-{policy}-{name}.log")
        summary = run.result.summary
        online = summary.online
        return {
            "step": "load",
            "policy": policy,
            "backend": name,
            "server_start_s": run.server_start_s,
            "offline_tokens_per_s": summary.offline.tokens_per_s,
            "attainment": online.attainment.joint.ratio,
            "ttft_ms": {"p50": ms(online.ttft_s.p50), "p99": ms(online.ttft_s.p99)},
            "tpot_ms": {"p50": ms(online.tpot_s.p50), "p99": ms(online.tpot_s.p99)},
            "online_requests": online.num_requests,
            "is_client_late": run.result.is_client_late,
            "summary": summary.to_dict(with_host=False),
        }


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for docs/results."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:,.1f}"

    lines = ["| model | replies | the same to the end |", "|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['replies']} | {row['same']} |"
        for row in rows
        if row["step"] == "tokens"
    ]
    loads = [row for row in rows if row["step"] == "load"]
    if loads:
        lines += [
            "",
            "| policy | attention | offline tokens/s | targets met | TTFT ms p50, p99 "
            "| TPOT ms p50, p99 |",
            "|---|---|---|---|---|---|",
        ]
    for row in loads:
        times = [
            ", ".join(cell(row[name][share]) for share in ("p50", "p99"))
            for name in ("ttft_ms", "tpot_ms")
        ]
        met = "" if row["attainment"] is None else f"{row['attainment']:.1%}"
        late = " (the client was late)" if row["is_client_late"] else ""
        tokens = cell(row["offline_tokens_per_s"])
        name = f"`{row['policy']}` | {row['backend']}{late}"
        lines.append(f"| {name} | {tokens} | {met} | {times[0]} | {times[1]} |")
    return "\n".join(lines) + "\n"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_end_to_end"), help="(%(default)s)")
    parser.add_argument("--only", choices=("tokens", "load"), help="one of the steps; else both")
    parser.add_argument(
        "--shape",
        choices=("tiny", *sorted(MODELS)),
        help="of the model under load (Llama-3.1-8B; on a CPU tiny)",
    )
    parser.add_argument("--stock", help="the other backend (triton; on a CPU torch_native)")
    parser.add_argument("--picker", type=Path, help="picker.json of scripts/gpu_profile")
    parser.add_argument(
        "--policy", nargs="+", default=["cosched"], help="of the load; tokens: the first (cosched)"
    )
    parser.add_argument("--backend", nargs="+", help="of the load (--stock and ours)")
    parser.add_argument("--online", help="chats, of the catalogue (azure-like; on a CPU demo-chat)")
    parser.add_argument("--online-rate", type=float, default=2.5, help="per second (%(default)s)")
    parser.add_argument("--offline", help="documents, of the catalogue (on a CPU demo-job)")
    parser.add_argument("--offline-requests", type=int, help="of the job (the whole workload)")
    parser.add_argument("--data-dir", help="folder with traces, where the catalogue needs them")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds (%(default)s)")
    parser.add_argument("--questions", type=int, default=8, help="per document (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a reply (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of SGLang, for all servers")
    args = parser.parse_args(arguments)
    is_cpu = args.device == "cpu"
    args.shape = args.shape or ("tiny" if is_cpu else "Llama-3.1-8B")
    args.online = args.online or ("demo-chat" if is_cpu else "azure-like")
    args.offline = args.offline or ("demo-job" if is_cpu else "documents")
    return args


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    servers, rows = Servers(args), list[dict[str, Any]]()
    length = 200 if args.device == "cpu" else 2000

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = {k: v for k, v in row.items() if k != "summary"}
        print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)

    if args.only != "load":
        tiny = write_model(folder, "tiny")
        row = await servers.tokens(tiny, TINY, length=length)
        note(row | {"model": "tiny, float32", "must_be_same": True})
    if args.only != "tokens":
        model = write_model(folder, args.shape)
        flags = TINY if args.shape == "tiny" else ("--load-format", "dummy")
        if args.shape != "tiny" and args.only != "load":
            note(await servers.tokens(model, flags, length=length) | {"must_be_same": False})
        for policy, name in product(args.policy, servers.loaded):
            note(await servers.load(policy, name, model, flags))
    return rows


def main() -> None:
    args = parsed()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_end_to_end: torch sees no CUDA GPU; --device cpu runs a tiny model without")
    leave_a_core_free()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cosched-end-to-end-") as folder:
        try:
            rows = asyncio.run(measure(args, Path(folder)))
        except CoschedError as error:
            sys.exit(f"gpu_end_to_end: {error}")
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"}
    result = {"config": config, "versions": versions("triton"), "rows": rows}
    (args.out / "end_to_end.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "end_to_end.md").write_text(markdown(rows))
    print(json.dumps(result))
    wrong = [row for row in rows if row.get("must_be_same") and row["same"] < row["replies"]]
    if wrong:
        sys.exit(f"gpu_end_to_end: replies differ: {wrong[0]['parted_at']}")


if __name__ == "__main__":
    main()
