"""SGLang's scheduler on the tiny model, which really computes, under a virtual clock."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    CloseSessionReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from cosched.config import ENV_VAR
from cosched.core.batch import BatchShape
from cosched.engine import port
from cosched.engine.attach import use_virtual_device
from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.local_engine import LocalEngine, Reply, lengths_of, made_up
from cosched.lab.simulation.clock import VirtualClock
from cosched.policies import policy_entry
from tests import adapters
from tests.engine.conftest import FLAGS
from tests.soak.spec import SoakSpec
from tests.soak.traffic import Ask, Command

_THROTTLED_RATE = 20.0

MAX_ADAPTERS = 2
"""In a batch, the model itself counted as one."""


class IterationTimes:
    """What an iteration takes: 4 ms and more, with rare hiccups."""

    def __init__(self, rng: Random, *, hiccups: bool) -> None:
        self._rng = rng
        self._hiccups = hiccups

    def __call__(self, shape: BatchShape) -> float:
        prefill = sum(prefill.num_new for prefill in shape.prefills)
        seconds = 0.004 + 2e-5 * prefill + 1e-4 * len(shape.decodes) + 1e-7 * sum(shape.decodes)
        is_hiccup = self._rng.random() < 0.003
        return seconds * (50 if is_hiccup and self._hiccups else 1)


class Ears:
    """Stands before the outbox of a `LocalEngine` and notes what that does not keep."""

    def __init__(self, outbox: Any) -> None:
        self._outbox = outbox
        self.num_output_logprobs: Counter[str] = Counter()
        self.num_input_logprobs: Counter[str] = Counter()
        self.num_flushes: Counter[bool] = Counter()
        self.num_events = 0

    def send_output(self, output: Any, request: Any = None) -> None:
        self.num_events += 1
        if isinstance(output, BatchTokenIDOutput):
            for counts, values in (
                (self.num_output_logprobs, output.output_token_logprobs_val),
                (self.num_input_logprobs, output.input_token_logprobs_val),
            ):
                for rid, of_rid in zip(output.rids, values or (), strict=False):
                    counts[rid] += len(of_rid or ())
        elif isinstance(output, FlushCacheReqOutput):
            self.num_flushes[output.success] += 1
        self._outbox.send_output(output, request)


class SoakEngine:
    """One engine of a specification. A context manager; one at a time per process."""

    def __init__(self, spec: SoakSpec, folders: dict[str, Path]) -> None:
        """folders: of the adapters."""
        self.spec = spec
        self.clock = VirtualClock()
        self.num_launched = 0
        self.last_plan: Any = None
        self._gpu_free_s = 0.0
        self._launched: dict[int, tuple[Any, float]] = {}
        self._times = IterationTimes(Random(f"{spec.seed}/hiccups"), hiccups=spec.has("hiccups"))
        config: dict[str, Any] = {
            "policy": spec.policy,
            "slo": {"ttft_ms": spec.ttft_ms, "tpot_ms": spec.tpot_ms},
            "kv": {"bidirectional_pages": spec.shared_pages},
        }
        if spec.policy == "hygen-throttled":
            config["offline_rate"] = _THROTTLED_RATE
        environment = {
            ENV_VAR: json.dumps(config),
            envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.name: "1",
            envs.SGLANG_CHECK_KV_PAGE_INVARIANTS.name: "1",
        }
        self._environment = mock.patch.dict(os.environ, environment)
        self._environment.start()
        self.local = LocalEngine(_flags(spec), tokenizer=True)
        self.scheduler = self.local.scheduler
        self.controller = getattr(self.scheduler, "cosched", None)
        self.lora_ids = {}
        if spec.has("lora"):
            self.lora_ids = adapters.load_adapters(self.scheduler, folders)
        self.ears = Ears(self.local.outbox)
        self.local.send_to(self.ears)
        self._take_over()

    def close(self) -> None:
        self.local.close()
        self._environment.stop()

    def __enter__(self) -> SoakEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def replies(self) -> dict[str, Reply]:
        return self.local.replies

    @property
    def is_paused(self) -> bool:
        return bool(self.scheduler._engine_paused)

    def held(self) -> set[str]:
        """Requests that sat out the iteration planned last."""
        return set() if self.last_plan is None else set(self.last_plan.paused)

    def send(self, ask: Ask) -> None:
        params = SamplingParams(temperature=0.0, **ask.sampling)
        params.normalize(self.scheduler.tokenizer)
        session = {}
        if ask.session is not None:
            session = {"session_params": SessionParams(id=ask.session)}
        self.local.send(
            TokenizedGenerateReqInput(
                rid=ask.rid,
                input_text="",
                input_ids=array("q", ask.tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=ask.logprob_start is not None,
                logprob_start_len=-1 if ask.logprob_start is None else ask.logprob_start,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=ask.stream,
                priority=ask.priority,
                lora_id=self.lora_ids[ask.adapter] if ask.adapter in self.lora_ids else None,
                **session,
            )
        )

    def abort(self, rid: str) -> None:
        self.local.send(AbortReq(rid=rid))

    def command(self, command: Command) -> None:
        argument = command.argument
        match command.name:
            case "abort":
                self.abort(argument)
            case "abort_all":
                self.local.send(AbortReq(abort_all=True))
            case "flush":
                self.local.send(FlushCacheReqInput())
            case "pause":
                self.local.send(PauseGenerationReqInput(mode=argument))
            case "continue":
                self.local.send(ContinueGenerationReqInput(torch_empty_cache=False))
            case "open" | "open_streaming":
                streaming = command.name == "open_streaming"
                self.local.send(
                    OpenSessionReqInput(
                        capacity_of_str_len=10_000, session_id=argument, streaming=streaming
                    )
                )
            case "close":
                self.local.send(CloseSessionReqInput(session_id=argument))
            case "query":
                self.local.send(GetInternalStateReq())
                self.scheduler.load_inquirer.get_loads()
            case _:
                raise AssertionError(command.name)

    def _check_adapters(self, batch: Any) -> None:
        """SGLang's worker asserts it, but only where the model runs."""
        used = {req.lora_id for req in batch.reqs}
        most = MAX_ADAPTERS
        assert not self.lora_ids or len(used) <= most, f"{len(used)} adapters in a batch of {most}"

    def _take_over(self) -> None:
        use_virtual_device(self.scheduler, self.clock, None)

        def timed_forward(batch: Any, **options: Any) -> Any:
            shape = port.shape_of(batch)
            self._gpu_free_s = max(self.clock.now_s(), self._gpu_free_s) + self._times(shape)
            self.num_launched += 1
            self._check_adapters(batch)
            result = forward(batch, **options) if self.spec.compute else _made_up(batch)
            self._launched[id(result)] = result, self._gpu_free_s
            return result

        def process_when_done(batch: Any, result: Any) -> None:
            if id(result) in self._launched:
                _, done_s = self._launched.pop(id(result))
                self.clock.advance_to(done_s)
            process(batch, result)

        forward = self.local.replace_forward(timed_forward, computes=self.spec.compute)
        process = self.local.replace_processing(process_when_done)
        if self.controller is not None:
            plan = self.controller.plan

            def noted_plan(*arguments: Any, **options: Any) -> Any:
                iteration = plan(*arguments, **options)
                self.last_plan = iteration.plan
                return iteration

            self.controller.plan = noted_plan


def _made_up(batch: Any) -> Any:
    """Next tokens that depend on prompt and length alone."""
    return made_up(
        [
            10 + (req.origin_input_ids[-1] + 7919 * length) % 2000
            for req, length in zip(batch.reqs, lengths_of(batch), strict=True)
        ]
    )


def _flags(spec: SoakSpec) -> list[str]:
    values = FLAGS | {
        "--model-path": ensure_demo_model(size="tiny", dtype="float32"),
        "--log-level": "critical",
        "--max-total-tokens": spec.capacity,
        "--max-running-requests": spec.slots,
        "--chunked-prefill-size": max(spec.chunk // spec.page_size, 1) * spec.page_size,
        "--page-size": spec.page_size,
        "--schedule-conservativeness": spec.conservativeness,
    }
    flags = [str(text) for pair in values.items() for text in pair]
    needed = policy_entry(spec.policy).arguments()
    flags += [text for flag, texts in needed.items() if "mixed" not in flag for text in texts]
    flags += ["--enable-mixed-chunk"] if spec.mixed else []
    flags += [] if spec.overlap else ["--disable-overlap-schedule"]
    if spec.has("lora"):
        flags += [*adapters.FLAGS, "--max-loras-per-batch", str(MAX_ADAPTERS)]
    flags += ["--enable-streaming-session"] if spec.has("stream-sessions") else []
    return flags
