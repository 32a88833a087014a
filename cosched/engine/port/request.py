"""A request: its properties, its output, its end and its answers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from http import HTTPStatus
from typing import Any

import numpy as np
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.runtime_context import get_disagg

from cosched.core.request import Traits
from cosched.engine.port.encoder import media_of
from cosched.limits.patterns import matches


def token_ids(req: Any) -> array[int]:
    """Prompt and generated tokens. Read-only: without output it is the prompt itself."""
    ids: array[int] = req.origin_input_ids
    return ids + req.output_ids if req.output_ids else ids


def num_outputs(reqs: Iterable[Any]) -> list[int]:
    """Generated tokens of each request."""
    return [len(req.output_ids) for req in reqs]


def num_cached_at_first(req: Any) -> int:
    """Prompt tokens found in the prefix cache when it was first admitted."""
    return req.cached_tokens  # type: ignore[no-any-return]


def num_retractions(req: Any) -> int:
    """How often a request was preempted, by plans and by the engine."""
    return req.retraction_count  # type: ignore[no-any-return]


def created_s(req: Any) -> float:
    """When it arrived at the server, by `time.perf_counter`; 0.0: unknown [s]."""
    return float(req.time_stats.created_time)


def prefix_key(req: Any) -> Hashable:
    """Requests share a prefix only if these are equal. The extra key contains the LoRA adapter."""
    return req.extra_key, req.cache_salt


def num_common(req: Any, other: Any, least: int) -> int:
    """Tokens with which both begin, if they may share their KV; 0 if fewer than `least`."""
    if prefix_key(req) != prefix_key(other):
        return 0
    ids, others = token_ids(req), token_ids(other)
    length = min(len(ids), len(others))
    # Most prompts that differ do so at their end, or throughout.
    end = slice(max(least - _TAIL, 0), least)
    if length < least or ids[end] != others[end]:
        return 0
    same = np.asarray(ids)[:length] == np.asarray(others)[:length]
    num = length if same.all() else int(same.argmin())
    return num if num >= least else 0


_TAIL = 16
"""Tokens that are compared first."""


def only_decodes() -> bool:
    """Whether prompts are computed by another server."""
    return bool(get_disagg().disaggregation_mode == "decode")


def shares_work() -> bool:
    """Whether prompts and replies are computed by different servers (PD disaggregation)."""
    return bool(get_disagg().disaggregation_mode != "null")


def traits_of(req: Any) -> Traits:
    """What the engine cannot do with it."""
    beams = req.beam_group
    streams_session = req.session is not None and req.session.streaming
    has_embeds = req.input_embeds is not None
    return Traits(
        # Beams share rows that are released together, a streaming session keeps its row and KV,
        # and with embeddings the engine would generate the output again.
        # A decode server cannot compute the KV again, and a prefill server has sent a part of it.
        can_preempt=beams is None and not streams_session and not has_embeds and not shares_work(),
        # SGLang does not mix decodes into a batch with one of these (`_get_new_batch_prefill_raw`).
        can_mix=beams is None and not req.return_logprob and not has_embeds,
        num_rows=1 if beams is None else int(beams.beam_width),
        adapter=req.lora_id,
        media=media_of(req),
    )


def has_penalties(req: Any) -> bool:
    """Whether SGLang's penalizers count its output."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def is_constrained(req: Any) -> bool:
    """Whether a grammar constrains its output."""
    params = req.sampling_params
    return bool(params.json_schema or params.regex or params.ebnf or params.structural_tag)


# --- Its end ---


def is_under_way(req: Any) -> bool:
    """Whether it has not ended. Ended requests stay in the running batch until it is filtered."""
    return req.finished_reason is None


def is_ending(req: Any) -> bool:
    """Whether it was aborted and ends with the present iteration."""
    return req.to_finish is not None


def are_any_ending(reqs: Iterable[Any]) -> bool:
    """Whether that is so of one of them: a plan asks for hundreds."""
    return any([req.to_finish is not None for req in reqs])


def is_aborted(req: Any) -> bool:
    """Whether a finished request was aborted, by an error or by its client."""
    return isinstance(req.finished_reason, FINISH_ABORT)


def is_cancelled(req: Any) -> bool:
    """Whether a finished request was aborted by its client: errors have a status."""
    return is_aborted(req) and req.finished_reason.status_code is None


def num_output(req: Any) -> int:
    """Output tokens that the client gets. For ``max_new_tokens: 0`` SGLang computes one, and sends
    none; what follows a stop is not sent either."""
    num_computed = len(req.output_ids)
    return num_computed if req.finished_len is None else min(num_computed, int(req.finished_len))


def is_before_samples(req: Any) -> bool:
    """Whether SGLang made this request itself, to have the prompt in the cache before the ``n``
    samples of it. No client gets it."""
    params = req.sampling_params
    return bool(params.n > 1 and params.max_new_tokens == 0)


def end_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """End a running or prefilling request with an error after the present iteration."""
    if req is scheduler.chunked_req:
        scheduler._pending_chunked_abort_req = req
    req.to_finish = FINISH_ABORT(message, status)


_MAX_TAIL_TOKENS = 256  # at the end of the output, in which a pattern is searched


def most_tail_tokens(req: Any, new_accepted_len: int) -> int:
    """Tokens at the end of the output that are decoded for stop strings and patterns."""
    longest: int = max(req.sampling_params.stop_str_max_len, _MAX_TAIL_TOKENS)
    return longest + max(new_accepted_len, 1)


def finish_by_pattern(req: Any, new_accepted_len: int) -> bool:
    """Whether the output matches a stop pattern after one of the new tokens. If so, the request
    finishes there."""
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
    """Put ``[value]`` into the ``meta_info`` of a reply, or of the first chunk of a stream. Nothing
    of the reply may have been sent yet: SGLang sends the entries that belong to the tokens it
    sends.
    """
    req.customized_info = {**(req.customized_info or {}), key: [value]}


class _AtEnd:
    """Stands for a list with one value per output token of which the last sent one counts."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __getitem__(self, part: slice) -> list[Any]:
        num = part.stop - part.start
        return [None] * (num - 1) + [self._read()] if num > 0 else []


def tell_client_at_end(req: Any, key: str, read: Callable[[], Any]) -> None:
    """Put a value into the ``meta_info`` of a reply, as it is when tokens are sent: the last entry
    of the list there."""
    req.customized_info = {**(req.customized_info or {}), key: _AtEnd(read)}


def send_abort(scheduler: Any, answer: Any, req: Any) -> None:
    """Send the message of `error_answer`."""
    scheduler.send_abort_output(answer, req)


def error_answer(req: Any, status: HTTPStatus, message: str) -> Any:
    """The message that answers a request with an error."""
    reason = {"type": "abort", "status_code": status, "message": message}
    return _make_abort_req(req, finished_reason=reason)


def answer_with_error(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Answer a request that is neither queued nor running."""
    send_abort(scheduler, error_answer(req, status, message), req)


def refuse(scheduler: Any, received: Any, message: str) -> None:
    """Answer a received request with HTTP 400 before a `Req` is made of it."""
    reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
    answer = AbortReq(rid=received.rid, finished_reason=reason)
    send_abort(scheduler, answer, received)


_MAX_CHECKS_PER_S = 500  # of all requests; each takes 0.2 ms, so these take 10 % of a core
_MIN_INTERVAL_S: float = tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT


def pace_checks(manager: Any) -> None:
    """Set the time between two checks of a request, from the number of requests of `manager`.

    SGLang checks for each request every 4 s whether its client is still connected. With 20,000
    waiting requests that is 5,000 checks per second, and new requests would wait for seconds.
    """
    interval_s = len(manager.rid_to_state) / _MAX_CHECKS_PER_S
    tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT = max(_MIN_INTERVAL_S, interval_s)


def is_http_worker(manager: Any) -> bool:
    """Whether this process is one of several HTTP processes (``--tokenizer-worker-num``)."""
    return isinstance(manager, TokenizerWorker)
