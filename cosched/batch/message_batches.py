"""Anthropic's Message Batches: another form of batches whose lines are of ``/v1/messages``.

They are those of the Batch API: the requests of a body become an input file, and results are
translated when they are read. Both APIs show all batches of this endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from cosched.batch.api import limit_of
from cosched.batch.batch_records import OPEN, Batch, NewBatch, Offer, Status
from cosched.batch.errors import CLOSED, ApiError, not_found
from cosched.batch.jsonl.line_results import encode_line
from cosched.batch.jsonl.lines import MESSAGES
from cosched.batch.message_lines import lines_of
from cosched.batch.routes import add_handlers, json_reply
from cosched.batch.service import BatchService
from cosched.limits.claims import presented_key

PATH = f"{MESSAGES}/batches"
_WINDOW, _WINDOW_S = "24h", 86_400
_KEPT_S = 29 * 86_400
"""How long results, and the input file, are kept."""
_MOST_LISTED = 1000

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> type of the error; others are an ``invalid_request_error`` or ``api_error``."""
_ENDINGS = {Status.CANCELLED: "canceled", Status.EXPIRED: "expired"}
_CODES = {CLOSED[status].code: ending for status, ending in _ENDINGS.items()}
"""Code of a line that its batch has closed -> type of its result."""


def add_message_routes(
    app: FastAPI,
    service: BatchService,
    *,
    isolate_keys: bool = True,
    offer: Callable[[], Offer] = Offer,
) -> None:
    """Before the application starts; arguments as of `cosched.batch.routes.add_routes`."""
    routes = _MessageRoutes(service, isolate_keys=isolate_keys, offer=offer)
    handlers = (
        ("POST", PATH, routes.create),
        ("GET", PATH, routes.list_batches),
        ("GET", f"{PATH}/{{id}}", routes.show),
        ("DELETE", f"{PATH}/{{id}}", routes.delete),
        ("POST", f"{PATH}/{{id}}/cancel", routes.cancel),
        ("GET", f"{PATH}/{{id}}/results", routes.results),
    )
    add_handlers(app, handlers, service.log_failure, lambda it: _error_json(it.status, str(it)))


class _MessageRoutes:
    def __init__(
        self, service: BatchService, *, isolate_keys: bool, offer: Callable[[], Offer]
    ) -> None:
        self._service = service
        self._isolate_keys = isolate_keys
        self._offer = offer
        self._files = service.files
        self._store = service.store
        self._threads = service.threads

    def _caller(self, request: Request) -> tuple[str, str | None]:
        """The owner whose threads a request takes, and the one whose batches it sees; None: all."""
        key = self._service.config.owner_of(presented_key(request.headers))
        return key, key if self._isolate_keys else None

    async def create(self, request: Request) -> Response:
        self._service.check_may_batch(request.headers)
        offer = self._offer()
        if MESSAGES not in offer.endpoints:
            raise ApiError(f"this model does not have {MESSAGES}: it generates no text")
        key, owner = self._caller(request)
        config, uploads = self._service.config, self._service.uploads
        async with uploads.body(request, key=key, owner=owner or "") as body:
            file = await self._threads.run_long(
                key,
                self._files.add,
                lines_of(body, config),
                owner=owner or "",
                filename="messages.jsonl",
                purpose="batch",
                expires_s=_KEPT_S,
            )
        num_lines = await self._threads.run_long(
            key, self._files.num_lines, file.id, max_line_bytes=config.max_line_bytes
        )
        asked = NewBatch(
            owner=owner or "",
            tenant="",
            endpoint=MESSAGES,
            input_file_id=file.id,
            completion_window=_WINDOW,
            window_s=_WINDOW_S,
            metadata=None,
            output_expires_after_s=_KEPT_S,
            num_bytes=file.num_bytes,
            num_lines=num_lines,
            model=offer.model,
        )
        try:
            batch = await self._service.create(key, asked, headers=request.headers)
        except ApiError:
            await self._threads.run(key, self._files.delete, file.id, owner=owner)
            raise
        return _shown(request, batch)

    async def _batch(self, request: Request) -> Batch:
        key, owner = self._caller(request)
        name = request.path_params["id"]
        batch = await self._threads.run(key, self._store.get, name, owner=owner)
        if batch.endpoint != MESSAGES:
            raise not_found("message batch", name)
        return batch

    async def show(self, request: Request) -> Response:
        return _shown(request, await self._batch(request))

    async def list_batches(self, request: Request) -> Response:
        key, owner = self._caller(request)
        query = request.query_params
        found, has_more = await self._threads.run(
            key,
            self._store.page,
            owner=owner,
            after=query.get("after_id"),
            before=query.get("before_id"),
            limit=limit_of(query.get("limit"), default=20, most=_MOST_LISTED),
            endpoint=MESSAGES,
        )
        shown = [_batch_json(batch, str(request.base_url)) for batch in found]
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        page = {"data": shown, "has_more": has_more, "first_id": first, "last_id": last}
        return json_reply(page)

    async def cancel(self, request: Request) -> Response:
        batch = await self._batch(request)
        key, owner = self._caller(request)
        try:
            batch = await self._threads.run(key, self._store.cancel, batch.id, owner=owner)
        except ApiError as error:
            if error.status != 409:  # which Anthropic's client sends again
                raise
            raise ApiError(f"batch {batch.id} has ended, or is about to") from None
        self._service.wake()
        return _shown(request, batch)

    async def delete(self, request: Request) -> Response:
        batch = await self._ended(request)
        key, owner = self._caller(request)
        await self._threads.run(key, self._delete, batch, owner)
        return json_reply({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        batch = await self._ended(request)
        key, _ = self._caller(request)
        blocks = self._blocks(batch)
        # An error must come before the status.
        first = await self._threads.run(key, next, blocks, b"")
        found = self._threads.each(key, chain([first], blocks))
        return StreamingResponse(found, media_type="application/x-jsonl")

    async def _ended(self, request: Request) -> Batch:
        batch = await self._batch(request)
        if batch.status in OPEN:
            raise ApiError(f"batch {batch.id} has not ended; cancel it, or wait")
        return batch

    def _delete(self, batch: Batch, owner: str | None) -> None:
        for name in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
            try:
                if name is not None:
                    self._files.delete(name, owner=owner)
            except ApiError as error:
                if error.status != 404:  # it has expired, or was deleted by its id
                    raise
        self._store.delete(batch.id, owner=owner)

    def _blocks(self, batch: Batch) -> Iterator[bytes]:
        """Results as Anthropic has them. ApiError 404, 503."""
        if not batch.total and batch.num_lines:
            yield from self._unread(batch)
        for name in (batch.output_file_id, batch.error_file_id):
            left = b""
            file = None if name is None else self._files.get(name, owner=None)
            for block in () if file is None else self._files.content(file):
                *whole, left = (left + block).split(b"\n")
                yield b"".join(map(_result_of, whole))

    def _unread(self, batch: Batch) -> Iterator[bytes]:
        """Of a batch that ended before its lines were checked."""
        ending = _ENDINGS.get(batch.status)
        result = {"type": ending} if ending else _errored(500, "the input file cannot be read")
        with suppress(FileNotFoundError), self._files.open(batch.input_file_id) as content:
            for line in content:
                custom_id = msgspec.json.decode(line)["custom_id"]
                yield encode_line({"custom_id": custom_id, "result": result})


def _result_of(line: bytes) -> bytes:
    """line: of a batch's output or error file."""
    record = msgspec.json.decode(line)
    reply, fault = record["response"], record["error"]
    result: dict[str, Any]
    if reply is None:
        ending = _CODES.get(fault["code"])
        result = {"type": ending} if ending else _errored(500, fault["message"])
    elif reply["status_code"] == 200:
        result = {"type": "succeeded", "message": reply["body"]}
    else:
        result = _errored(reply["status_code"], reply["body"]["error"]["message"])
    return encode_line({"custom_id": record["custom_id"], "result": result})


def _errored(status: int, message: str) -> dict[str, Any]:
    return {"type": "errored", "error": _error_json(status, message)}


def _error_json(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _shown(request: Request, batch: Batch) -> Response:
    return json_reply(_batch_json(batch, str(request.base_url)))


def _batch_json(batch: Batch, base_url: str) -> dict[str, Any]:
    def at(status: Status) -> str | None:
        return None if status not in batch.times else _time(batch.times[status])

    is_ended = batch.status not in OPEN
    is_canceling = batch.status is Status.CANCELLING
    status = "ended" if is_ended else "canceling" if is_canceling else "in_progress"
    url = f"{base_url.rstrip('/')}{PATH}/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": at(batch.status) if is_ended else None,
        "cancel_initiated_at": at(Status.CANCELLING),
        "archived_at": None,
        "results_url": url if is_ended else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    total = batch.total or batch.num_lines
    if batch.status in OPEN:
        return counts | {"processing": total}
    counts |= {"succeeded": batch.completed, "errored": batch.failed - batch.closed}
    counts[_ENDINGS.get(batch.status, "errored")] += batch.closed + total - batch.total
    return counts


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
