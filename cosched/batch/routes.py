"""The HTTP routes of the Batch API, on an application that has others too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from cosched.batch.api import (
    batch_json,
    error_json,
    expiry_seconds,
    file_json,
    limit_of,
    new_batch,
    page_json,
    unknown_fields,
)
from cosched.batch.batch_records import Batch, File, NewBatch, Offer
from cosched.batch.callback_rules import METADATA_KEY
from cosched.batch.errors import ApiError, StoreUnavailableError
from cosched.batch.files import checked_name, too_large, upload_blocks
from cosched.batch.jsonl.parquet import is_parquet
from cosched.batch.once import file_digest, json_digest, once_of
from cosched.batch.prometheus import exposition
from cosched.batch.service import BatchService
from cosched.batch.threads import FairSlots, FairThreads
from cosched.limits.claims import presented_key

Handler = Callable[[Request], Awaitable[Response]]
LogFailure = Callable[[StoreUnavailableError], None]
_DECODERS, _MAX_DECODED = 2, 16
"""Parquet files that are decoded at a time, one per API key, and files of a key that wait."""


def add_routes(
    app: FastAPI,
    service: BatchService,
    *,
    isolate_keys: bool = True,
    offer: Callable[[], Offer] = Offer,
    protect: Callable[[Handler], Handler] = lambda it: it,
) -> None:
    """Before the application starts.

    isolate_keys  files and batches are hidden from requests with another API key
    offer         what batches may ask for, once requests come
    protect       marks a route as the operator's: it shows all owners
    """
    routes = _Routes(service, isolate_keys=isolate_keys, offer=offer)
    handlers = (
        ("POST", "/v1/files", routes.upload),
        ("GET", "/v1/files", routes.list_files),
        ("GET", "/v1/files/{id}", routes.show_file),
        ("DELETE", "/v1/files/{id}", routes.delete_file),
        ("GET", "/v1/files/{id}/content", routes.content),
        ("POST", "/v1/batches", routes.create),
        ("GET", "/v1/batches", routes.list_batches),
        ("GET", "/v1/batches/{id}", routes.show),
        ("POST", "/v1/batches/{id}/cancel", routes.cancel),
    )
    add_handlers(app, handlers, service.log_failure)
    for path, handler in (
        ("/cosched/metrics", routes.metrics),
        ("/cosched/batches", routes.list_all),
    ):
        answer = protect(_with_errors(handler, service.log_failure))
        app.add_api_route(path, answer, methods=["GET"])


def add_handlers(
    app: FastAPI,
    handlers: Iterable[tuple[str, str, Handler]],
    log_failure: LogFailure,
    error_body: Callable[[ApiError], Any] = error_json,
) -> None:
    """handlers: method, path, and what answers; error_body: JSON of the answer for an error."""
    for method, path, handler in handlers:
        answer = _with_errors(handler, log_failure, error_body)
        # A client that writes a slash at the end may not follow a redirect with its body.
        for each in (path, f"{path}/"):
            app.add_api_route(each, answer, methods=[method], name=handler.__name__)


def _with_errors(
    handler: Handler,
    log_failure: LogFailure,
    error_body: Callable[[ApiError], Any] = error_json,
) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:  # in the middle of an upload: no error of the server
            return Response(status_code=400)
        except ApiError as error:
            if isinstance(error, StoreUnavailableError):
                log_failure(error)
            reply = json_reply(error_body(error), status=error.status)
            if error.retry_after_s is not None:
                reply.headers["retry-after"] = str(error.retry_after_s)
            return reply

    return answer


class _Routes:
    def __init__(
        self, service: BatchService, *, isolate_keys: bool, offer: Callable[[], Offer]
    ) -> None:
        self._service = service
        self._offer = offer
        self._isolate_keys = isolate_keys
        self._files = service.files
        self._store = service.store
        self._threads = service.threads
        slots = FairSlots(_DECODERS, per_key=1, max_waiting=_MAX_DECODED)
        self._decoders = FairThreads("cosched-decoders", slots)

    def _owner(self, request: Request) -> str | None:
        """The owner whose files and batches a request may see; None: all."""
        if not self._isolate_keys:
            return None
        return self._service.config.owner_of(presented_key(request.headers))

    def _key(self, request: Request) -> str:
        """The owner whose threads and uploads a request takes, also where all see all files."""
        return self._service.config.owner_of(presented_key(request.headers))

    async def metrics(self, request: Request) -> Response:
        read = self._service.snapshot()
        text = await self._threads.run(None, lambda: exposition(read()))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def upload(self, request: Request) -> Response:
        key, owner = self._key(request), self._owner(request) or ""
        is_repeated = False
        if (once := once_of(request.headers, owner=owner, route="files")) is not None:
            earlier = await self._threads.run(key, self._files.made_before, once)
            is_repeated = earlier is not None
        async with self._service.uploads.form(
            request, key=key, owner=owner, is_repeated=is_repeated
        ) as (
            form,
            room,
        ):
            content, purpose = form.get("file"), form.get("purpose")
            if not isinstance(content, UploadFile):
                raise ApiError("file: the form has no file of that name", param="file")
            if purpose != "batch":
                raise ApiError(f"purpose must be 'batch', not {purpose!r}", param="purpose")
            if (content.size or 0) > self._service.config.max_file_bytes:
                raise too_large(self._service.config)
            filename, expires_s = checked_name(content.filename or ""), expiry_seconds(form)
            if once is not None:
                digest = await self._threads.run_long(
                    key, file_digest, content.file, filename, expires_s
                )
                once = replace(once, digest=digest)
            threads = self._decoders if is_parquet(content.file) else self._threads
            file = await threads.run_long(
                key,
                self._files.add,
                upload_blocks(content.file, config=self._service.config, room=room),
                owner=owner,
                filename=filename,
                purpose="batch",
                expires_s=expires_s,
                once=once,
            )
        return json_reply(file_json(file))

    async def list_files(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(f"order must be asc or desc, not {order!r}", param="order")
        found, has_more = await self._threads.run(
            self._key(request),
            self._files.page,
            owner=self._owner(request),
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit_of(query.get("limit"), default=10_000, most=10_000),
            newest_first=order == "desc",
        )
        encoded = await self._threads.run(self._key(request), _files_page, found, has_more)
        return Response(encoded, media_type="application/json")

    async def show_file(self, request: Request) -> Response:
        return json_reply(file_json(await self._file(request)))

    async def delete_file(self, request: Request) -> Response:
        name = request.path_params["id"]
        owner = self._owner(request)
        await self._threads.run(self._key(request), self._files.delete, name, owner=owner)
        return json_reply({"id": name, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        key, blocks = self._key(request), self._files.content(file)
        # An error must come before the status.
        first = await self._threads.run(key, next, blocks, b"")
        return StreamingResponse(
            self._threads.each(key, chain([first], blocks)),
            media_type="application/jsonl",
            headers={"content-length": str(file.num_bytes)},
        )

    async def _file(self, request: Request) -> Any:
        name, owner = request.path_params["id"], self._owner(request)
        return await self._threads.run(self._key(request), self._files.get, name, owner=owner)

    async def create(self, request: Request) -> Response:
        self._service.check_may_batch(request.headers)
        owner, key = self._owner(request), self._key(request)
        body = await request.body()
        asked = new_batch(body, owner=owner or "", offer=self._offer())
        asked = replace(asked, ignored=self._ignored(body, asked))
        if (once := once_of(request.headers, owner=owner or "", route="batches")) is not None:
            once = replace(once, digest=json_digest(body))
            made = await self._threads.run(key, self._store.made_before, once)
            if made is not None:
                return await self._shown(key, made)
        file = await self._threads.run(key, self._files.get, asked.input_file_id, owner=owner)
        if file.purpose != "batch":
            raise ApiError(
                f"input_file_id must be of a file with purpose 'batch', not {file.purpose!r}",
                param="input_file_id",
            )
        asked = replace(asked, num_bytes=file.num_bytes)
        if self._service.config.quota.max_waiting_lines is not None:
            most = self._service.config.max_line_bytes
            count = self._files.num_lines
            num_lines = await self._threads.run_long(key, count, file.id, max_line_bytes=most)
            asked = replace(asked, num_lines=num_lines)
        batch = await self._service.create(key, asked, headers=request.headers, once=once)
        return await self._shown(key, batch)

    def _ignored(self, body: bytes, asked: NewBatch) -> list[str]:
        """What has no effect. ApiError 400: no callback may go to the URL that it names."""
        ignored, rules = unknown_fields(body), self._service.callback_rules
        if rules is not None:
            rules.check_metadata(asked.metadata)
        if METADATA_KEY in (asked.metadata or {}) and (
            rules is None or not rules.settings.allow_client_urls
        ):
            ignored.append(f"metadata.{METADATA_KEY}")
        return ignored

    async def _shown(self, key: str, batch: Batch) -> Response:
        [shown] = await self._threads.run(key, self._json_of, [batch], is_operator=False)
        return json_reply(shown)

    async def list_batches(self, request: Request) -> Response:
        return await self._listed(request, self._owner(request))

    async def list_all(self, request: Request) -> Response:
        """Of all owners, for the operator."""
        return await self._listed(request, None, is_operator=True)

    async def _listed(
        self, request: Request, owner: str | None, *, is_operator: bool = False
    ) -> Response:
        query = request.query_params
        key = None if owner is None else self._key(request)
        found, has_more = await self._threads.run(
            key,
            self._store.page,
            owner=owner,
            after=query.get("after"),
            limit=limit_of(query.get("limit"), default=20, most=100),
        )
        shown = await self._threads.run(key, self._json_of, found, is_operator=is_operator)
        servers = {"servers": self._service.num_servers}
        return json_reply(page_json(shown, has_more) | {"cosched": servers})

    def _json_of(self, found: Sequence[Batch], *, is_operator: bool) -> list[dict[str, Any]]:
        """is_operator: with callbacks to URLs of the configuration."""
        outlooks = self._service.outlooks(found)
        callbacks = self._service.callbacks_of(found, only_own=not is_operator)
        return [
            batch_json(batch, outlooks.get(batch.id), callbacks=callbacks.get(batch.id, ()))
            for batch in found
        ]

    async def show(self, request: Request) -> Response:
        name, owner, key = request.path_params["id"], self._owner(request), self._key(request)
        batch = await self._threads.run(key, self._store.get, name, owner=owner)
        return await self._shown(key, batch)

    async def cancel(self, request: Request) -> Response:
        name, owner, key = request.path_params["id"], self._owner(request), self._key(request)
        batch = await self._threads.run(key, self._store.cancel, name, owner=owner)
        self._service.wake()
        return await self._shown(key, batch)


def _files_page(found: list[File], has_more: bool) -> bytes:
    """In a thread: there may be 10,000."""
    return msgspec.json.encode(page_json([file_json(file) for file in found], has_more))


def json_reply(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
