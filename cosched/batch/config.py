"""The settings of the Batch API: the key ``batches`` of ``COSCHED_CONFIG``."""

from __future__ import annotations

import hashlib

import msgspec

from cosched.batch.storage import folder_of, without_secrets
from cosched.limits.claims import digest_of

OFF = "off"
"""As `BatchesConfig.folder`: no Batch API, also where a program has a default folder."""


class QuotaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may have; beyond it new files and batches are refused with HTTP 429.

    max_open_batches   most batches that have not ended, of one ``metadata.tenant`` of an API key;
                       absent: any number
    max_waiting_lines  most lines without a result in those batches; absent: any number
    max_stored_mb      most that the files of an API key may have together, results among them [MB
                       of 1,000,000 bytes]; results are never refused; absent: any size
    """

    max_open_batches: int | None = None
    max_waiting_lines: int | None = None
    max_stored_mb: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_open_batches", "max_waiting_lines"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"quota.{name} must be at least 1, not {value}")
        if self.max_stored_mb is not None and not 0 < self.max_stored_mb < float("inf"):
            raise ValueError(f"quota.max_stored_mb must be above 0, not {self.max_stored_mb}")


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Batch API of the server (docs/api.md).

    folder          where files are kept, and the store where it has no URL of its own: a folder, or
                    a URL that fsspec knows (``s3://BUCKET/PATH``), which needs `url`; off: the
                    server has no Batch API; absent: a folder in the user's data directory where
                    ``cosched serve`` starts the server, off where another program does
    url             of the store's database: ``postgresql://USER@HOST/DATABASE``, which several
                    servers with one `folder` may share, or ``sqlite:///FILE``; absent: an SQLite
                    file in `folder`, for one server at a time
    max_file_mb     most that an uploaded file may have [MB of 1,000,000 bytes]
    max_lines       most lines of a batch
    max_line_bytes  most bytes of one line
    high_watermark  lines that are at the scheduler at a time, waiting or running; it chooses well
                    among many, and a restart repeats them
    low_watermark   lines left at which more are taken from the store, a page at a time
    late_margin_s   a batch whose window leaves less than this beyond the time that it takes is
                    late: it goes before others [s]; not above pool.deadline_margin_s
    tenant_weights  `metadata.tenant` -> its share beside others, who have 1 each
    quota           what one tenant may have
    owners          a name -> API keys whose files and batches are the same, in clear text or as
                    ``sha256:`` and the hex digest. They are kept under the first one: a new key is
                    added at the end, and the first stays even when it opens nothing any more
    isolate_keys    files and batches are seen only with the API key that they were made with;
                    absent: where the server has an ``--api-key``, or `owners` names keys
    lease_s         a server of a shared store that was not heard of for so long is dead, and others
                    answer its lines [s]
    keep_ended_days  how long a batch is kept after its end, and its results with it [days]; absent:
                    for ever
    """

    folder: str | None = None
    url: str | None = None
    max_file_mb: float = 200.0
    max_lines: int = 50_000
    max_line_bytes: int = 16 << 20
    high_watermark: int = 256
    low_watermark: int = 192
    late_margin_s: float = 600.0
    tenant_weights: dict[str, float] = msgspec.field(default_factory=dict)
    quota: QuotaConfig = QuotaConfig()
    owners: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    isolate_keys: bool | None = None
    lease_s: float = 30.0
    keep_ended_days: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_file_mb < float("inf"):
            raise ValueError(f"max_file_mb must be a positive number, not {self.max_file_mb}")
        for name in ("max_lines", "max_line_bytes", "high_watermark"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.low_watermark < self.high_watermark:
            raise ValueError(
                f"low_watermark must be from 0 to {self.high_watermark - 1} (below "
                f"high_watermark), not {self.low_watermark}"
            )
        if not 0 <= self.late_margin_s < float("inf"):
            raise ValueError(f"late_margin_s must be 0 or more, not {self.late_margin_s}")
        for name, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"tenant_weights.{name} must be above 0, not {weight}")
        if not 0 < self.lease_s < float("inf"):
            raise ValueError(f"lease_s must be above 0, not {self.lease_s}")
        if self.keep_ended_days is not None and not 0 < self.keep_ended_days < float("inf"):
            raise ValueError(f"keep_ended_days must be above 0, not {self.keep_ended_days}")
        hashed = {name: tuple(map(digest_of, keys)) for name, keys in self.owners.items()}
        for key in (key for keys in self.owners.values() for key in keys):
            if key.startswith("sha256:") and digest_of(key) != key:
                raise ValueError("owners: after 'sha256:' come 64 hexadecimal digits in lower case")
        every = [key for keys in hashed.values() for key in keys]
        if len(set(every)) < len(every):
            raise ValueError("owners: one key is there twice")
        msgspec.structs.force_setattr(self, "owners", hashed)
        if self.url is not None and self.folder is None:
            raise ValueError("url without folder: uploaded files need a place")
        if self.folder is not None and folder_of(self.folder) is None and self.url is None:
            raise ValueError(
                f"folder {without_secrets(self.folder)!r} is a URL, where no SQLite can be: url "
                "must say where the database is, postgresql://USER@HOST/DATABASE or sqlite:///FILE"
            )

    def isolates(self, api_key: str | None) -> bool:
        """Whether files and batches of one key are hidden from others, on a server that asks for
        this key."""
        if self.isolate_keys is None:
            return bool(api_key or self.owners)
        return self.isolate_keys

    def owner_of(self, key: str) -> str:
        """Whom the files and batches of an API key belong to: the digest of the key, or of the
        first one of its owner; "" without a key."""
        if not key:
            return ""
        # Who shows a digest has read the configuration, and has no key.
        digest = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
        keys = next((keys for keys in self.owners.values() if digest in keys), (digest,))
        return keys[0].removeprefix("sha256:")

    @property
    def is_on(self) -> bool:
        """Whether the server has the Batch API."""
        return self.folder not in (None, OFF)

    @property
    def is_shared(self) -> bool:
        """Whether several servers may have the store at a time."""
        return self.url is not None and not self.url.startswith("sqlite")

    @property
    def max_file_bytes(self) -> int:
        return int(self.max_file_mb * 1_000_000)
