"""The settings of the Batch API: the key ``batches`` of ``COSCHED_CONFIG``."""

from __future__ import annotations

import ipaddress
import math

import msgspec

from cosched.batch.storage import folder_of, without_secrets
from cosched.limits.claims import check_name, configured_digest, digest_of

OFF = "off"
"""As `BatchesConfig.folder`: no Batch API, even where the program has a default folder."""


def _check(name: str, value: float | None, *, at_least: int | None = None) -> None:
    if value is None:
        return
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, not {value}")


class QuotaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits per API key; new files and batches beyond them are refused with HTTP 429.

    max_open_batches   most batches of an API key that have not ended; where the server does not
                       isolate keys, of one ``metadata.tenant``
    max_waiting_lines  most lines without a result in those batches
    max_stored_mb      most that the files of an API key take together [MB of 1,000,000 bytes],
                       results included and 1,000 bytes more for each; results are never refused
    """

    max_open_batches: int | None = None
    max_waiting_lines: int | None = None
    max_stored_mb: float | None = None

    def __post_init__(self) -> None:
        _check("quota.max_open_batches", self.max_open_batches, at_least=1)
        _check("quota.max_waiting_lines", self.max_waiting_lines, at_least=1)
        _check("quota.max_stored_mb", self.max_stored_mb)


NO_QUOTA = QuotaConfig()


class CallbacksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is told that a batch has ended (docs/api.md). Callbacks are signed with a secret:
    ``whsec_`` and 24 to 64 bytes in base64.

    secret_file     file with the secret; absent: the environment variable
                    ``COSCHED_CALLBACK_SECRET``. Each of several secrets in it signs
    owner_secret_files  name of an API key's owner -> file with the secret for the callbacks of its
                    batches
    urls            URLs that are told of every batch
    allow_client_urls  ``metadata.callback_url`` of a batch is told of its end too
    allow_http      URLs may begin with ``http://``
    allow_networks  private, loopback or link-local addresses that may be called: ``10.1.0.0/16``,
                    ``::1/128``
    timeout_s       most seconds of an attempt
    retry_s         pause after the first failed attempt; it doubles up to an hour, less up to half
                    of it by chance [s]
    give_up_h       how long after the end of a batch attempts go on [h]
    max_at_once     most attempts at a time; to a host one
    """

    secret_file: str | None = None
    owner_secret_files: dict[str, str] = msgspec.field(default_factory=dict)
    urls: tuple[str, ...] = ()
    allow_client_urls: bool = True
    allow_http: bool = False
    allow_networks: tuple[str, ...] = ()
    timeout_s: float = 10.0
    retry_s: float = 5.0
    give_up_h: float = 72.0
    max_at_once: int = 8

    def __post_init__(self) -> None:
        for name in ("timeout_s", "retry_s", "give_up_h"):
            _check(f"callbacks.{name}", getattr(self, name))
        _check("callbacks.max_at_once", self.max_at_once, at_least=1)
        for network in self.allow_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"callbacks.allow_networks: {error}") from None


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Batch API of the server (docs/api.md).

    folder          for files, and for the database unless `url` is given: a folder, or a URL of
                    fsspec (``s3://BUCKET/PATH``), which needs `url`; off: no Batch API; absent: the
                    user's data directory with ``cosched serve``, else off
    url             of the database: ``postgresql://USER@HOST/DATABASE``, which several servers with
                    one `folder` may share, or ``sqlite:///FILE``; absent: SQLite in `folder`, for
                    one server at a time
    max_file_mb     most that an uploaded file may have [MB of 1,000,000 bytes]
    max_lines       most lines of a batch
    max_line_bytes  most bytes of one line
    high_watermark  most lines at the scheduler, waiting or running; a restart repeats them
    low_watermark   lines left at which more are taken from the store
    media_in_flight  most lines with images, video or sound at the scheduler: SGLang keeps their
                    pixels in host memory, 75 MB for 4,000 tokens of Qwen2.5-VL
    late_margin_s   a batch is late if its expected end leaves less than this of its window, and
                    goes before others [s]; not above pool.deadline_margin_s
    tenant_weights  shares of offline device time (docs/architecture.md): name of an API key's owner
                    -> its share; KEY/TENANT -> share of what the key gets; TENANT: of keys without
                    a name; others have 1
    quota           limits per API key
    callbacks       which URLs are told that a batch has ended; absent: none
    owners          a name -> API keys that share files and batches, in clear text or as ``sha256:``
                    and the hex digest. The first key keeps them: add new keys at the end, and keep
                    the first one
    isolate_keys    files and batches are visible only with the API key that made them; absent: with
                    ``--api-key`` or `owners`
    lease_s         a server of a shared store counts as dead after this time without a heartbeat
                    [s]
    keep_ended_days  how long a batch and its results are kept after its end [days]; absent: forever
    """

    folder: str | None = None
    url: str | None = None
    max_file_mb: float = 200.0
    max_lines: int = 50_000
    max_line_bytes: int = 16 << 20
    high_watermark: int = 1024
    low_watermark: int = 896
    media_in_flight: int = 128
    late_margin_s: float = 600.0
    tenant_weights: dict[str, float] = msgspec.field(default_factory=dict)
    quota: QuotaConfig = QuotaConfig()
    callbacks: CallbacksConfig | None = None
    owners: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    isolate_keys: bool | None = None
    lease_s: float = 30.0
    keep_ended_days: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_lines", "max_line_bytes", "high_watermark", "media_in_flight"):
            _check(name, getattr(self, name), at_least=1)
        for name in ("max_file_mb", "lease_s", "keep_ended_days"):
            _check(name, getattr(self, name))
        for tenant, weight in self.tenant_weights.items():
            _check(f"tenant_weights.{tenant}", weight)
        if not 0 <= self.low_watermark < self.high_watermark:
            raise ValueError(
                f"low_watermark must be from 0 to {self.high_watermark - 1} (below "
                f"high_watermark), not {self.low_watermark}"
            )
        if not 0 <= self.late_margin_s < math.inf:
            raise ValueError(f"late_margin_s must be 0 or more, not {self.late_margin_s}")
        hashed = {
            name: tuple(configured_digest(key, "owners") for key in keys)
            for name, keys in self.owners.items()
        }
        for name in hashed:
            check_name(name)
        every = [key for keys in hashed.values() for key in keys]
        if len(set(every)) < len(every):
            raise ValueError("owners: one key is there twice")
        msgspec.structs.force_setattr(self, "owners", hashed)
        if self.url is not None and self.folder is None:
            raise ValueError("url without folder: uploaded files need a folder")
        if self.folder is not None and folder_of(self.folder) is None and self.url is None:
            raise ValueError(
                f"folder {without_secrets(self.folder)!r} is a URL, which cannot hold SQLite: url "
                "must name the database, postgresql://USER@HOST/DATABASE or sqlite:///FILE"
            )

    def isolates(self, api_key: str | None) -> bool:
        """Whether files and batches of one key are hidden from others. `api_key`: the server's."""
        if self.isolate_keys is None:
            return bool(api_key or self.owners)
        return self.isolate_keys

    def owner_of(self, key: str) -> str:
        """The owner of files and batches made with an API key: the digest of the key, or of the
        first key of its owner; "" without a key."""
        if not key:
            return ""
        digest = digest_of(key)
        keys = next((keys for keys in self.owners.values() if digest in keys), (digest,))
        return keys[0].removeprefix("sha256:")

    @property
    def is_on(self) -> bool:
        return self.folder not in (None, OFF)

    @property
    def is_shared(self) -> bool:
        """Whether several servers may use the store at a time."""
        return self.url is not None and not self.url.startswith("sqlite")

    @property
    def max_file_bytes(self) -> int:
        return int(self.max_file_mb * 1_000_000)
