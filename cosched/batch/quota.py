"""Limits per API key: new batches and files beyond them are refused.

Where batches belong to no key, because the server does not keep keys apart, the limits of batches
are per `metadata.tenant`: a client can choose another name, so they only keep order among friends.
"""

from __future__ import annotations

import sqlalchemy as sa

from cosched.batch.batch_records import OPEN, File, NewBatch, Status
from cosched.batch.config import QuotaConfig
from cosched.batch.database import Database, batches, files
from cosched.batch.errors import ApiError
from cosched.batch.jsonl.batch_api import QUOTA_CODE

_RETRY_S = 30
_MB = 1_000_000
FILE_BYTES = 1000
"""As which a file counts beside its bytes: its row and its name."""


def check_new_batch(
    database: Database, connection: sa.Connection, request: NewBatch, quota: QuotaConfig
) -> None:
    """ApiError 429. Other checks wait until the end of this transaction."""
    if quota.max_open_batches is None and quota.max_waiting_lines is None:
        return
    database.keep_others_from_quotas(connection)
    left = sa.case(
        (batches.c.status == Status.VALIDATING, batches.c.num_lines),
        else_=batches.c.total - batches.c.completed - batches.c.failed,
    )
    num_open, num_waiting = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(left), 0)).where(
            batches.c.owner == request.owner,
            sa.true() if request.owner else batches.c.tenant == request.tenant,
            batches.c.status.in_(OPEN),
        )
    ).one()
    is_of_key = request.owner or not request.tenant
    who = "this API key" if is_of_key else f"tenant {request.tenant!r}"
    most = quota.max_open_batches
    if most is not None and num_open >= most:
        message = f"{num_open} batches that have not ended, and may have {most}"
        raise _refused(f"{who} has {message} (batches.quota.max_open_batches)", retry_s=_RETRY_S)
    most = quota.max_waiting_lines
    if most is not None and num_waiting + request.num_lines > most:
        raise _refused(
            f"{who} has {num_waiting} lines without a result, and may have {most} "
            f"(batches.quota.max_waiting_lines): {request.num_lines} more are too many",
            param="input_file_id",
            retry_s=_RETRY_S,
        )


def check_new_file(
    database: Database, connection: sa.Connection, file: File, quota: QuotaConfig, *, now: int
) -> None:
    """ApiError 429. Other checks wait until the end of this transaction."""
    if quota.max_stored_mb is None:
        return
    database.keep_others_from_quotas(connection)
    room = most_stored(quota.max_stored_mb) - stored_bytes(connection, file.owner, now=now)
    if file.num_bytes + FILE_BYTES > room:
        raise beyond_stored(room, file.num_bytes + FILE_BYTES)


def most_stored(max_stored_mb: float) -> int:
    return int(max_stored_mb * _MB)


def stored_bytes(connection: sa.Connection, owner: str, *, now: int) -> int:
    """What the files of an owner count as."""
    size = files.c.num_bytes + FILE_BYTES
    query = sa.select(sa.func.coalesce(sa.func.sum(size), 0)).where(
        files.c.owner == owner,
        sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now),
    )
    return int(connection.execute(query).scalar_one())


def beyond_stored(room: int, num_bytes: int) -> ApiError:
    """room: unused part of the quota [bytes]"""
    return _refused(
        f"the files of this API key may have {max(room, 0)} bytes more, of "
        f"batches.quota.max_stored_mb, and each counts {FILE_BYTES} beside its own: {num_bytes} "
        "are too many. Delete some",
        param="file",
    )


def _refused(message: str, *, param: str | None = None, retry_s: int | None = None) -> ApiError:
    return ApiError(message, status=429, code=QUOTA_CODE, param=param, retry_after_s=retry_s)
