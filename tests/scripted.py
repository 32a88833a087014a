"""Scripts for SGLang's scripted runtime, which is in its wheel without scripts: the engine computes
one iteration for each ``yield``. `tests.upstream` runs them."""

from __future__ import annotations

# Outside of any guard: each process that the runtime spawns imports this module.
import cosched.bootstrap  # noqa: F401  # isort: skip

from collections.abc import Iterator
from typing import Any

import sglang.test.scripted_runtime.context  # noqa: F401  # before the next ones
from sglang.test.scripted_runtime.test_case import ScriptedTestCase
from sglang.test.scripted_runtime_chunked_helpers import (
    LIFECYCLE_STAGES,
    advance_to_lifecycle_stage,
    run_until,
    run_until_finished,
)

from cosched.lab.demo_model import ensure_demo_model

CHUNK = 64
NUM_OUTPUT = 4


class Scripts(ScriptedTestCase):  # type: ignore[misc]
    """Requests of three chunks and a piece; what is aborted or done holds no memory."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.ENGINE_KWARGS = {
            "model_path": str(ensure_demo_model(size="tiny", dtype="float32")),
            **{"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"},
            **{"chunked_prefill_size": CHUNK, "max_total_tokens": 20000, "log_level": "error"},
            # The canary is for GPUs.
            **{"kv_canary": "none", "kv_canary_real_data": "none", "kv_canary_sweep_interval": 0},
        }
        super().setUpClass()

    def each_stage(self, script: Any) -> None:
        for stage in LIFECYCLE_STAGES:
            with self.subTest(stage=stage):
                self.server.execute_script(script, args=(stage,))

    def test_prompts_around_a_chunk_are_answered(self) -> None:
        for num_tokens in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 4 * CHUNK):
            self.server.execute_script(answer, args=(num_tokens,))

    def test_a_request_is_retracted_and_goes_on(self) -> None:
        self.each_stage(retract)

    def test_all_requests_are_aborted(self) -> None:
        self.each_stage(abort_all)

    def test_a_request_is_aborted_beside_another(self) -> None:
        self.each_stage(abort_one)

    def test_a_waiting_request_is_aborted(self) -> None:
        self.server.execute_script(abort_waiting)


def start(t: Any, *, num_tokens: int = 4 * CHUNK - 3, token: int = 1) -> Any:
    options = {"max_new_tokens": NUM_OUTPUT, "ignore_eos": True, "prompt_token": token}
    return t.start_req(prompt_len=num_tokens, **options)


def advance(request: Any, stage: str) -> Iterator[None]:
    yield from advance_to_lifecycle_stage(
        request, stage, num_middle_chunks=3, max_new_tokens=NUM_OUTPUT
    )


def check_gone(request: Any) -> None:
    assert request.kv_pages == request.lock_refs == 0, f"{request.kv_pages=} {request.lock_refs=}"


def answer(t: Any, num_tokens: int) -> Iterator[None]:
    request = start(t, num_tokens=num_tokens, token=7)
    yield from run_until_finished(request)


def retract(t: Any, stage: str) -> Iterator[None]:
    request = start(t)
    yield from advance(request, stage)
    t.pause_generation(mode="retract")
    yield
    if not request.finished:
        num_output = len(request.req.output_ids)
        for _ in range(3):
            yield
            assert request.status == "waiting" and len(request.req.output_ids) == num_output
    t.continue_generation()
    yield from run_until_finished(request)
    check_gone(request)


def abort_all(t: Any, stage: str) -> Iterator[None]:
    request = start(t)
    yield from advance(request, stage)
    t.abort_all()
    yield from run_until_finished(request, max_steps=8)
    check_gone(request)


def abort_one(t: Any, stage: str) -> Iterator[None]:
    one, other = start(t), start(t, token=2)
    yield from advance(one, stage)
    t.abort(one)
    yield from run_until(one, lambda request: not request.kv_pages, max_steps=8)
    yield from run_until_finished(other)
    check_gone(one)
    check_gone(other)


def abort_waiting(t: Any) -> Iterator[None]:
    request = start(t)
    t.abort(request)
    yield
    check_gone(request)
    yield from run_until_finished(start(t))
