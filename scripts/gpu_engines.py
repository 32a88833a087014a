"""Engines in the process of a script, and the host and device times of their iterations.

Shared by the parts of `gpu_loop`."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from cosched.wire import OFFLINE_PRIORITY

MIXES = [(64, 1000, (512,)), (64, 4000, (512,)), (128, 2000, (1024,)), (200, 1000, (2048,))]
MIXES.append((64, 2500, (64, 128, 256, 448, 512, 640, 896, 1024, 2048)))
"""Decodes, tokens of context of each, and chunks of a prompt beside them."""

TINY_MIXES = [(2, 40, (16,)), (3, 30, (8, 16))]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2000}


class Run:
    """One part: its scale, and where its results go."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.is_gpu = args.device == "cuda"
        self.is_tiny = args.tiny or not self.is_gpu
        self.out: Path = args.out
        self.seed: int = args.seed
        self.device: str = args.device
        self.flash: Path | None = args.flash_attention
        self.mixes = TINY_MIXES if self.is_tiny else MIXES
        self._file = (args.out / "loop.jsonl").open("a")

    def note(self, step: str, **values: Any) -> None:
        row = {"step": step, **values}
        print(json.dumps(row), file=self._file, flush=True)
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(shown), flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A failure inside leaves the other steps' results."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.note("failed", of=name, error=f"{type(error).__name__}: {error}"[:300])
        print(f"# {name}: {time.perf_counter() - begun:.1f} s", flush=True)


def tokens(num: int, seed: int, vocab: int = 2000) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(10, vocab, (num,), generator=generator).tolist()
    return ids


def share(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@contextmanager
def engine(
    run: Run, policy: str, *flags: str, config: dict[str, Any] | None = None
) -> Iterator[Any]:
    """A LocalEngine under a policy, as `cosched serve` would start it."""
    from cosched.config import Config, configured
    from cosched.engine.arguments import engine_arguments
    from cosched.lab.local_engine import LocalEngine

    fields = LLAMA | TINY if run.is_tiny else LLAMA
    fields = fields | (config or {})
    fields["dtype"] = "bfloat16" if run.is_gpu and not run.is_tiny else "float32"
    folder = Path(tempfile.mkdtemp(prefix="gpu-loop-"))
    (folder / "config.json").write_text(json.dumps(fields))
    given = ["--model-path", str(folder), "--load-format", "dummy", "--log-level", "warning"]
    if run.is_gpu:
        attention = "triton" if run.flash is None else "fa3"
        given += ["--attention-backend", attention, "--sampling-backend", "pytorch"]
    settings = Config(policy=policy)
    without: list[list[str]] = [[]]
    if run.is_gpu and not run.is_tiny:  # where SGLang cannot capture its graphs
        without += [["--cuda-graph-backend-prefill", "disabled"]]
        without += [[*without[1], "--cuda-graph-backend-decode", "disabled"]]
    for more in without:
        begun = time.perf_counter()
        arguments = engine_arguments([*given, *flags, *more], settings, mixed_chunk=True)
        with configured(settings):
            try:
                local = LocalEngine(arguments)
            except Exception as error:
                if more is without[-1]:
                    raise
                traceback.print_exc()
                run.note("failed", of=f"engine {policy} {more}", error=repr(error)[:300])
                gc.collect()
                torch.cuda.empty_cache()
                continue
            run.note("engine", policy=policy, flags=more, built_s=time.perf_counter() - begun)
            with local:
                yield local
            break
    gc.collect()


def prefill_sizes(run: Run) -> set[int]:
    """Tokens of the chunks that are measured, alone and beside decodes."""
    both = {num + chunk for num, _, chunks in run.mixes for chunk in chunks}
    return both | {chunk for *_, chunks in run.mixes for chunk in chunks}


def sizes(run: Run) -> list[str]:
    """Flags of the engines under load."""
    if run.is_tiny:
        graphs = ["--cuda-graph-backend-prefill", "disabled"] if run.is_gpu else []
        graphs += ["--cuda-graph-backend-decode", "disabled"] if run.is_gpu else []
        return [*graphs, "--max-total-tokens", "3000", "--max-running-requests", "16"]
    return [
        *("--cuda-graph-bs-decode", *map(str, (1, 32, 64, 128, 200))),
        *("--cuda-graph-bs-prefill", *map(str, sorted(prefill_sizes(run)))),
        *("--mem-fraction-static", "0.8", "--max-running-requests", "256"),
        *("--chunked-prefill-size", "4096", "--context-length", "16384"),
    ]


class Probe:
    """Host and device times of each launch of an engine."""

    def __init__(self, local: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        scheduler = local.scheduler
        worker = scheduler.tp_worker
        self._runner = runner = worker.model_runner
        self._wrap(scheduler, "run_batch", self._launch)
        self._wrap(runner, "forward", self._forward)
        for name in ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"):
            backend = getattr(getattr(runner, name, None), "backend", None)
            if backend is not None and hasattr(backend, "replay"):
                self._wrap(backend, "replay", self._replay)

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        setattr(owner, name, partial(around, getattr(owner, name)))

    def _event(self) -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _launch(self, original: Any, batch: Any, *args: Any, **options: Any) -> Any:
        decoding = batch.decoding_reqs or []
        if batch.forward_mode.is_decode():
            decodes, new = len(batch.reqs), 0
        else:
            decodes, new = len(decoding), (batch.extend_num_tokens or 0) - len(decoding)
        row = self._row = {"decodes": decodes, "new": new, "begun": time.perf_counter()}
        if decodes:
            row["context"] = (int(batch.seq_lens_cpu.sum()) - new) // decodes
        result = original(batch, *args, **options)
        row["returned"] = time.perf_counter()
        if "end" in row:
            self.rows.append(row)
        return result

    def _forward(self, original: Any, *args: Any, **options: Any) -> Any:
        row = self._row
        row["entered"], row["start"] = time.perf_counter(), self._event()
        result = original(*args, **options)
        row["end"], row["left"] = self._event(), time.perf_counter()
        return result

    def _replay(self, original: Any, *args: Any, **options: Any) -> Any:
        self._row["replayed"], self._row["start"] = time.perf_counter(), self._event()
        return original(*args, **options)

    def take(self) -> list[dict[str, Any]]:
        """Milliseconds of each launch since the last call: launch (host, to the first kernel of the
        layers), forward (host, the launch of all layers), returned (host, all), device (from the
        first kernel of the layers to the last), idle (of the device before), apart (ends)."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rows, self.rows = self.rows, []
        found: list[dict[str, Any]] = []
        before = None
        for row in rows:
            first = row.get("replayed", row["entered"])
            one = {name: row.get(name) for name in ("decodes", "new", "context")}
            one["launch"] = (first - row["begun"]) * 1e3
            one["forward"] = (row["left"] - first) * 1e3
            one["returned"] = (row["returned"] - row["begun"]) * 1e3
            one["device"] = between(row["start"], row["end"])
            one["replays"] = float("replayed" in row)
            if before is not None:
                one["idle"] = between(before["end"], row["start"])
                one["after"] = kind_of(before)
                one["apart"] = between(before["end"], row["end"])
            before = row
            found.append(one)
        return found


def kind_of(row: dict[str, Any]) -> str:
    return ("mixed" if row["decodes"] else "prefill") if row["new"] else "decode"


def between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e3
    return float(begin.elapsed_time(end))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians, the tail of what users see, and the share of the time in which the device works."""
    names = ("launch", "forward", "returned", "device", "idle", "apart", "replays")
    values = {name: [row[name] for row in rows if name in row] for name in names}
    found: dict[str, float] = {"n": len(rows)}
    found |= {f"{name}_ms": statistics.median(v) for name, v in values.items() if v}
    if values["apart"]:
        found |= {"apart_p99_ms": share(values["apart"], 0.99)}
        found |= {"apart_mean_ms": statistics.fmean(values["apart"])}
        found["idle_mean_ms"] = statistics.fmean(values["idle"])
        found["launch_p90_ms"] = share(values["launch"], 0.9)
        found["busy"] = 1 - sum(values["idle"]) / sum(values["apart"])
    return found


def mixing(run: Run, local: Any, probe: Probe) -> None:
    """Whole iterations as designed: decodes, a chunk, and both."""
    from cosched.lab.profiling.design import DesignedBatch, DesignedPrefill, Round
    from cosched.lab.profiling.measure import measure_rounds

    layers = local.scheduler.model_config.num_hidden_layers
    rounds = []
    for decodes, context, chunks in run.mixes:
        everyone = tuple(range(decodes))
        batches = [DesignedBatch(decodes=everyone)]
        for chunk in chunks:
            prefills = (DesignedPrefill(num_new=chunk),)
            batches += [DesignedBatch(prefills=prefills)]
            batches += [DesignedBatch(prefills=prefills, decodes=everyone)]
        rounds.append(Round(pool=(context,) * decodes, batches=tuple(batches)))
    probe.take()
    measured = measure_rounds(local, rounds, repeats=3 if run.is_tiny else 7, seed=run.seed)
    print(f"# {measured.num_discarded} discarded, {measured.num_not_run} not run", flush=True)
    whole = []
    for point in measured.points:
        mean = statistics.fmean(point.batch.decodes) if point.batch.decodes else None
        new = sum(prefill.num_new for prefill in point.batch.prefills)
        ms = point.seconds * 1e3
        whole.append({"decodes": len(point.batch.decodes), "new": new, "context": mean, "ms": ms})
    launches = probe.take()

    def of(key: tuple[int, int, int], name: str) -> float | None:
        num, new, context = key
        values = [
            row[name]
            for row in (whole if name == "ms" else launches)
            if (row["decodes"], row["new"]) == (num, new)
            and name in row
            and (not num or abs(row["context"] - context) < 0.3 * context)
        ]
        return statistics.median(values) if values else None

    for decodes, context, chunks in run.mixes:
        for chunk in chunks:
            keys = {"decode": (decodes, 0, context), "chunk": (0, chunk, context)}
            keys["mixed"] = decodes, chunk, context
            row = {f"{name}_ms": of(key, "ms") for name, key in keys.items()}
            row |= {f"{name}_device_ms": of(key, "device") for name, key in keys.items()}
            row |= {f"{name}_launch_ms": of(key, "launch") for name, key in keys.items()}
            for name in ("chunk", "mixed"):
                host = of(keys[name], "forward")
                row[f"{name}_layer_ms"] = None if host is None else host / layers
                row[f"{name}_replays"] = of(keys[name], "replays")
            if row["mixed_ms"] and row["decode_ms"]:
                row["us_per_token"] = (row["mixed_ms"] - row["decode_ms"]) * 1e3 / chunk
            both, alone = row["mixed_device_ms"], row["decode_device_ms"]
            if both and alone:
                row["device_us_per_token"] = (both - alone) * 1e3 / chunk
            run.note("mixing", decodes=decodes, context=context, chunk=chunk, **row)


def chats(run: Run, local: Any, probe: Probe, *, name: str, beside: bool, policy: str) -> None:
    """Chats that decode, alone or beside a batch of long prompts."""
    num, prompt, reply = (3, 20, 12) if run.is_tiny else (64, 1000, 250)
    jobs, length, start = (4, 60, 4) if run.is_tiny else (90, 2000, 30)
    salt = zlib.crc32(name.encode()) % 1000 * 1000
    for i in range(num):
        local.submit(f"{name}-c{i}", tokens(prompt, salt + i), max_new_tokens=reply, priority=0)
    started = False

    def on_iteration(count: int) -> None:
        nonlocal started
        if beside and not started and count >= start:
            started = True
            for i in range(jobs):
                ids = tokens(length, salt + 500 + i)
                own = {} if policy == "sglang" else {"priority": OFFLINE_PRIORITY}
                local.submit(f"{name}-o{i}", ids, max_new_tokens=24, **own)

    probe.take()
    controller = getattr(local.scheduler, "cosched", None)
    errors: list[tuple[bool, float]] = []

    def listen(iteration: Any) -> None:
        if iteration.predicted_s and iteration.is_exact and iteration.seconds > 0:
            ratio = iteration.predicted_s / iteration.seconds - 1
            errors.append((bool(iteration.shape.prefills), ratio))

    from cosched.engine.features.plan_timing import PlanTiming

    waited = 0, 0
    if controller is not None:
        controller.observer.add_listener(listen)
        timing = controller.features.get(PlanTiming)
        if timing is not None:
            waited = timing.num_waits, timing.num_dry
    begun = time.perf_counter()
    local.run_until_idle(on_iteration=on_iteration)
    took_s = time.perf_counter() - begun
    rows = probe.take()
    extra: dict[str, Any] = {"took_s": took_s}
    if controller is not None:
        controller.observer.remove_listener(listen)
        if timing is not None:
            extra |= {"lead_ms": timing.lead_s * 1e3, "waits": timing.num_waits - waited[0]}
            extra |= {"dry": timing.num_dry - waited[1]}
        for kind, is_mixed in (("decode", False), ("prefill", True)):
            ratios = [abs(r) for has, r in errors[len(errors) // 4 :] if has is is_mixed]
            if ratios:
                extra[f"{kind}_error"] = statistics.median(ratios)
                extra[f"{kind}_error_p90"] = share(ratios, 0.9)
    steady = [row for row in rows if row["decodes"] == num and not row["new"]]
    steady = steady[len(steady) // 4 :]
    if not beside:
        run.note("chats", policy=policy, name=name, beside=False, **summary(steady), **extra)
        return
    first = next((i for i, row in enumerate(rows) if i > start and row["new"]), 0)
    ends = max((i for i, row in enumerate(rows) if row["new"]), default=0)
    during = rows[first:ends]
    new = sum(row["new"] for row in during)
    lasted_s = sum(row.get("apart", 0.0) for row in during) / 1e3 or float("nan")
    decoding = [row for row in during if row["decodes"]]
    gaps, gap = [], 0.0
    for row in during:  # between two tokens of a chat
        gap += row.get("apart", 0.0)
        if row["decodes"] >= num // 2:
            gaps.append(gap)
            gap = 0.0
    if gaps:
        extra |= {"gap_mean_ms": statistics.fmean(gaps), "gap_p50_ms": statistics.median(gaps)}
        extra |= {"gap_p99_ms": share(gaps, 0.99)}
    extra |= {"batch_tokens_per_s": new / lasted_s, "lasted_s": lasted_s}
    extra |= {"mixed_share": sum(1 for r in decoding if r["new"]) / max(1, len(during))}
    run.note("chats", policy=policy, name=name, beside=True, **summary(during), **extra)
    for kind, before in product(("decode", "prefill", "mixed"), repeat=2):
        idle = [r["idle"] for r in during if kind_of(r) == kind and r.get("after") == before]
        if len(idle) > 4:
            low, mid, high = (share(idle, part) for part in (0.1, 0.5, 0.9))
            run.note(
                "idle",
                policy=policy,
                of=kind,
                after=before,
                n=len(idle),
                p10=low,
                p50=mid,
                p90=high,
            )


def iterations(run: Run) -> None:
    """Before any other request: prompts with equal first tokens would be cached in part."""
    with engine(run, "cosched", *sizes(run)) as local, run.step("mixing"):
        mixing(run, local, Probe(local))


def with_cosched(run: Run) -> None:
    from cosched.engine.features.plan_timing import PlanTiming

    with engine(run, "cosched", *sizes(run)) as local:
        probe = Probe(local)
        controller = local.scheduler.cosched
        features = controller.features
        late = features.get(PlanTiming)
        for name in ("warm", "late", "late again"):
            with run.step(f"chats {name}"):
                chats(run, local, probe, name=name, beside=False, policy="cosched")
        with run.step("chats early"):
            note, controller.observer.note_launched = controller.observer.note_launched, None
            if late is not None:
                features.silence(late)
            chats(run, local, probe, name="early", beside=False, policy="cosched")
            if late is not None:
                features.add(late)
            controller.observer.note_launched = note
        if late is not None:
            late.lead_s = 0.001  # where it settles
            with run.step("chats late from 1 ms"):
                chats(run, local, probe, name="late from 1 ms", beside=False, policy="cosched")
        for name in ("beside", "beside again"):
            with run.step(f"chats {name}"):
                chats(run, local, probe, name=name, beside=True, policy="cosched")


def stock(run: Run) -> None:
    with engine(run, "sglang", *sizes(run)) as local:
        probe = Probe(local)
        for name in ("warm", "alone"):
            with run.step(f"chats {name}"):
                chats(run, local, probe, name=name, beside=False, policy="sglang")
        for name in ("beside", "beside again"):
            with run.step(f"chats {name}"):
                chats(run, local, probe, name=name, beside=True, policy="sglang")
