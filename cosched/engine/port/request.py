"""A request: what it is, what it has generated, how it ends and how it is answered."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX
from sglang.srt.managers.scheduler import _make_abort_req

from cosched.core.request import Traits
from cosched.limits.patterns import matches


def token_ids(req: Any) -> array[int]:
    """Prompt and generated tokens. Not to be written: without output it is the prompt itself."""
    ids: array[int] = req.origin_input_ids
    return ids + req.output_ids if req.output_ids else ids


def num_outputs(reqs: Iterable[Any]) -> list[int]:
    """Generated tokens of each."""
    return [len(req.output_ids) for req in reqs]


def num_cached_at_first(req: Any) -> int:
    """Prompt tokens found in the prefix cache when it was first admitted."""
    return req.cached_tokens  # type: ignore[no-any-return]


def num_retractions(req: Any) -> int:
    """How often it went back to the queue, by plans and by the engine."""
    return req.retraction_count  # type: ignore[no-any-return]


def created_s(req: Any) -> float:
    """When it came to the server, by the clock of `time.perf_counter`; 0.0: unknown [s]."""
    return float(req.time_stats.created_time)


def prefix_key(req: Any) -> Hashable:
    """Requests share nothing unless these are equal. SGLang has the LoRA adapter in its extra
    key."""
    return req.extra_key, req.cache_salt


def traits_of(req: Any) -> Traits:
    """What cannot be done with it."""
    beams = req.beam_group
    streams_session = req.session is not None and req.session.streaming
    has_embeds = req.input_embeds is not None
    return Traits(
        # Beams share rows that only the whole group can give back, a streaming session keeps its
        # row and its KV, and with embeddings the engine would generate the output again.
        can_stop=beams is None and not streams_session and not has_embeds,
        # SGLang mixes no batch in which one of these is (`_get_new_batch_prefill_raw`).
        can_mix=beams is None and not req.return_logprob and not has_embeds,
        num_rows=1 if beams is None else int(beams.beam_width),
        adapter=req.lora_id,
    )


def has_penalties(req: Any) -> bool:
    """Whether what it may generate depends on what it has generated, by SGLang's penalizers."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def is_constrained(req: Any) -> bool:
    """Whether a grammar says what it may generate."""
    params = req.sampling_params
    return bool(params.json_schema or params.regex or params.ebnf or params.structural_tag)


# --- Its end ---


def is_under_way(req: Any) -> bool:
    """Whether a request of the running batch goes on: one that has ended stays in it until it is
    next filtered."""
    return req.finished_reason is None


def is_ending(req: Any) -> bool:
    """Whether it ends with the iteration under way, aborted as it is; only the engine sees it."""
    return req.to_finish is not None


def is_aborted(req: Any) -> bool:
    """Whether a finished request was aborted: it ended neither by itself nor by its limit."""
    return isinstance(req.finished_reason, FINISH_ABORT)


def is_cancelled(req: Any) -> bool:
    """Whether a finished request was cancelled by its client: errors have a status."""
    return is_aborted(req) and req.finished_reason.status_code is None


def end_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Have a request that runs, or is in the middle of its prefill, end with an error after the
    iteration under way."""
    if req is scheduler.chunked_req:
        scheduler._pending_chunked_abort_req = req
    req.to_finish = FINISH_ABORT(message, status)


MOST_TAIL_TOKENS = 256
"""Tokens at the end of the output in which a match of a pattern is looked for."""


def most_tail_tokens(req: Any, new_accepted_len: int) -> int:
    """Most tokens to decode for stop strings and patterns."""
    longest: int = max(req.sampling_params.stop_str_max_len, MOST_TAIL_TOKENS)
    return longest + max(new_accepted_len, 1)


def finish_by_pattern(req: Any, new_accepted_len: int) -> bool:
    """Whether the new tokens end in a match; the request then finishes there."""
    tail_len = req._stop_match_tail_len(new_accepted_len)
    start = len(req.output_ids) - tail_len
    window = req.output_ids[start:]
    for num_tokens in range(max(1, len(window) - new_accepted_len + 1), len(window) + 1):
        text = req.tokenizer.decode(window[:num_tokens])
        for pattern in req.sampling_params.stop_regex_strs:
            if matches(pattern, text):
                req.finished_reason = FINISHED_MATCHED_REGEX(matched=pattern)
                req.finished_len = start + num_tokens
                return True
    return False


# --- Its client ---


def tell_client(req: Any, key: str, value: str) -> None:
    """Put a value into the ``meta_info`` of a reply, of a streamed one in its first piece: a list
    with it alone. Nothing of the request may have been sent yet.

    SGLang sends of each list the entries of the tokens it sends.
    """
    req.customized_info = {**(req.customized_info or {}), key: [value]}


def send_abort(scheduler: Any, answer: Any, req: Any) -> None:
    """Answer a request that ends outside the stream of outputs."""
    scheduler.send_abort_output(answer, req)


def error_answer(req: Any, status: HTTPStatus, message: str) -> Any:
    """The message that answers a request with an error; `send_abort` sends it."""
    reason = {"type": "abort", "status_code": status, "message": message}
    return _make_abort_req(req, finished_reason=reason)


def answer_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Answer a request that was built, and is neither queued nor running now."""
    send_abort(scheduler, error_answer(req, status, message), req)


def refuse(scheduler: Any, received: Any, message: str) -> None:
    """Answer a received request that was not built with HTTP 400."""
    reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
    answer = AbortReq(rid=received.rid, finished_reason=reason)
    send_abort(scheduler, answer, received)


_MOST_PER_S = 500
"""Checks of all requests together. Each takes about 0.2 ms, so these take a tenth of a core."""


_LEAST_S: float = tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT


def pace_checks(manager: Any) -> None:
    """Set the time between two checks of a request, by the number of requests of `manager`. One
    that waits already follows after its next check.

    SGLang wakes each waiting request every 4 s to ask whether its client is still connected. With
    20,000 waiting requests that is 5,000 times a second, and new chats would wait for seconds
    before they reach the scheduler.
    """
    interval_s = len(manager.rid_to_state) / _MOST_PER_S
    tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT = max(_LEAST_S, interval_s)
