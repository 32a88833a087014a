"""JSON of the Batch API: requests are checked, answers are written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from cosched.batch.batch_records import Batch, File, NewBatch, Offer, Status
from cosched.batch.errors import ApiError
from cosched.batch.forecast import BatchOutlook
from cosched.batch.jsonl.lines import URLS, canonical_url, hint_for

TENANT_KEY = "tenant"
"""In a batch's metadata: the tenant it belongs to."""

_ANY = Offer()
_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400
_ERROR_TYPES = {429: "insufficient_quota", 503: "server_error"}
_PATH = re.compile(r"\$\.([a-z_.]+)")
_WINDOW = re.compile(r"([0-9]{1,6})([mhd])")


_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class _ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class _Create(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: _ExpiresAfter | None = None


def new_batch(body: bytes, *, owner: str, offer: Offer = _ANY) -> NewBatch:
    """From the body of ``POST /v1/batches``. ApiError 400."""
    try:
        asked = msgspec.json.decode(body, type=_Create)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = _PATH.search(str(error))
        raise ApiError(str(error), param=found[1] if found else None) from None
    endpoint = canonical_url(asked.endpoint)
    if endpoint not in offer.endpoints:
        why = " that this model has" if endpoint in URLS else ""
        supported = ", ".join(offer.endpoints)
        raise ApiError(
            f"invalid value: {asked.endpoint!r}. Supported values{why} are: {supported}"
            f"{hint_for(endpoint)}",
            param="endpoint",
            code="invalid_value",
        )
    expires = asked.output_expires_after
    return NewBatch(
        owner=owner,
        tenant=(asked.metadata or {}).get(TENANT_KEY, ""),
        endpoint=endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        window_s=window_seconds(asked.completion_window),
        metadata=asked.metadata,
        output_expires_after_s=None if expires is None else expires.seconds,
        model=offer.model,
    )


def unknown_fields(body: bytes) -> list[str]:
    """Of a body that `new_batch` accepts: gateways add fields for themselves (LiteLLM's
    ``custom_llm_provider``). They have no effect, and the reply names them."""
    known = _Create.__struct_fields__
    return [name for name in msgspec.json.decode(body, type=dict[str, Any]) if name not in known]


def window_seconds(text: str) -> int:
    """``30m``, ``24h``, ``2d``, in seconds. ApiError 400."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise ApiError(
            "completion_window must be a number and m, h or d (30m, 1h, 24h, 2d), at most 30d, "
            f"not {text!r}",
            param="completion_window",
        )
    return seconds


def expiry_seconds(form: Mapping[str, Any]) -> int | None:
    """How long an uploaded file is kept, by the fields of its form. ApiError 400."""
    fields = {"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"}
    given = {name: form[field] for name, field in fields.items() if field in form}
    if not given:
        return None
    try:
        return msgspec.convert(given, _ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise ApiError(f"expires_after: {error}", param="expires_after") from None


def limit_of(text: str | None, *, default: int, most: int) -> int:
    """The query parameter of a list. ApiError 400."""
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ApiError(f"limit must be an integer from 1 to {most}, not {text!r}", param="limit")
    return int(text)


def error_json(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": _ERROR_TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def page_json(page: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


def file_json(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_json(
    batch: Batch,
    outlook: BatchOutlook | None = None,
    *,
    callbacks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """outlook: None if nothing is known, or the batch has ended. callbacks: of its end."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None
        if not batch.faults
        else {
            "object": "list",
            "data": [asdict(fault) for fault in batch.faults],
        },
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{
            f"{status}_at": batch.times.get(status.value)
            for status in Status
            if status is not Status.VALIDATING
        },
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata,
        "cosched": _own_json(batch, outlook, callbacks),  # not a field of OpenAI's
    }


def _own_json(
    batch: Batch, outlook: BatchOutlook | None, callbacks: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """device_seconds: what the lines cost, those aborted while they ran included; not there where
    the engine does not say."""
    cost = {"device_seconds": round(batch.device_s, 6)} if batch.device_s else {}
    told = {"callbacks": list(callbacks)} if callbacks else {}
    ignored = {"ignored": list(batch.ignored)} if batch.ignored else {}
    return (cost | told | ignored | ({} if outlook is None else _outlook_json(outlook))) or None


def _outlook_json(outlook: BatchOutlook) -> dict[str, Any]:
    forecast = outlook.forecast
    return {
        "state": outlook.state,
        "running": outlook.num_running,
        "running_done": round(outlook.running_done, 3),
        "finish_s": None if forecast is None else round(forecast.finish_s),
        "most_s": None if forecast is None else round(forecast.most_s),
        "slack_s": None if forecast is None else round(forecast.slack_s),
        "is_late": forecast is not None and forecast.is_late,
        "miss_chance": None if forecast is None else round(forecast.miss_chance, 3),
    }
