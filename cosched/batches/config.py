"""The settings of the Batch API: the key ``batches`` of ``COSCHED_CONFIG``."""

from __future__ import annotations

import msgspec

__all__ = ["BatchesConfig"]


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Batch API of the server (docs/batches.md).

    folder          where uploaded files and the store are kept, for one server at a time; absent:
                    the server has no Batch API
    url             of the store's database, as SQLAlchemy reads it; absent: an SQLite file in
                    `folder`
    max_file_mb     most that an uploaded file may have [MB of 1,000,000 bytes]
    max_lines       most lines of a batch
    max_line_bytes  most bytes of one line
    high_watermark  lines that are at the scheduler at a time, waiting or running; it chooses well
                    among many, and a restart repeats them
    low_watermark   lines left at which more are taken from the store, a page at a time
    """

    folder: str | None = None
    url: str | None = None
    max_file_mb: float = 200.0
    max_lines: int = 50_000
    max_line_bytes: int = 16 << 20
    high_watermark: int = 256
    low_watermark: int = 192

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
        if self.url is not None and self.folder is None:
            raise ValueError("url without folder: uploaded files need a place")

    @property
    def max_file_bytes(self) -> int:
        return int(self.max_file_mb * 1_000_000)
