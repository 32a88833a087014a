"""The settings of a job; its docstring is the help of ``cosched batch``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from cosched.batch.jsonl.client import RetryRules
from cosched.batch.jsonl.prefix_order import LINES_AT_SERVER
from cosched.errors import ConfigError

DEFAULT_BASE_URL = "http://127.0.0.1:30000"
ABSENT_WAIT_S = 5.0
VIAS = ("auto", "batches", "lines")
"""How lines are sent: as batches of the server, or one by one; auto: as batches if it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The options of one call of run_batch, named as the fields or nearly so.

    input             requests (JSONL)
    out               answers (JSONL)
    errors            failed lines (JSONL; default: OUT.errors.jsonl)
    ordered           write answers in the order of the input; default: as they are finished. One
                      slow line then holds back at most 4 x concurrency others
    overwrite         start over: empty OUT and the error file. Default: continue where they end
    retry_failed      send the lines that failed in earlier calls again, with those that are still
                      open; their errors are kept in the error file's name with .before-retry
    max_line_bytes    a longer line is an error of that line
    base_url          a server that runs
    api_key           the server's key (default: $COSCHED_API_KEY)
    via               how lines are sent: uploaded as batches of the server, or one by one; auto:
                      as batches if the server has them
    window            completion window of the batches that this call makes: 30m, 6h, 2d (default:
                      that of the job's earlier calls; 24h)
    detach            upload, and do not wait for the results
    require_offline   refuse a server that would treat these as online requests (default: a warning)
    wait_s            how long to wait at the start if no server listens yet (default: 5)
    model_path        start a server for this job and stop it at the end; SGLang's own flags go
                      after --; its log is OUT.server.log
    port              port of that server (default: a free one)
    start_timeout_s   how long that server may take to start
    server_flags      of that server
    concurrency       requests at the server at a time, in the order of their prefixes (with
                      --ordered in parts of the file). They wait in its offline pool: a large number
                      lets it choose
    timeout_s         a line fails if one try takes longer (default: no limit; offline requests
                      may wait for hours)
    max_wait_s        give up when the server has been unreachable for this long
    max_retries       how often a line is sent again after a 500 or an aborted answer. A server that
                      is down or full costs no retries
    progress_every_s  seconds between progress lines when stderr is not a terminal
    seed              of the random part of the waits between tries
    fetch_only        write the results that the server has for an earlier job
    """

    input: str
    out: str
    errors: str | None = None
    base_url: str = DEFAULT_BASE_URL
    model_path: str | None = None
    server_flags: tuple[str, ...] = ()
    port: int | None = None
    start_timeout_s: float = 3600.0
    api_key: str | None = None
    concurrency: int = LINES_AT_SERVER
    ordered: bool = False
    overwrite: bool = False
    max_line_bytes: int = 16 << 20
    timeout_s: float | None = None
    max_wait_s: float = RetryRules().max_wait_s
    wait_s: float | None = None
    require_offline: bool = False
    retry_failed: bool = False
    max_retries: int = RetryRules().max_retries
    progress_every_s: float = 10.0
    seed: int = 0
    via: str = "auto"
    window: str | None = None
    detach: bool = False
    fetch_only: bool = False

    def __post_init__(self) -> None:
        _at_least("--concurrency", self.concurrency, 1)
        _at_least("--max-line-bytes", self.max_line_bytes, 1)
        _at_least("--max-wait", self.max_wait_s, 0)
        if self.wait_s is not None:
            _at_least("--wait-s", self.wait_s, 0)
        _at_least("--retries", self.max_retries, 0)
        for option, value in (
            ("--timeout", self.timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--progress-every", self.progress_every_s),
        ):
            if value is not None and not value > 0:  # also refuses nan
                raise ConfigError(f"{option} must be above 0 seconds, not {value:g}")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 1 to 65535, not {self.port}")
        if self.retry_failed and self.overwrite:
            raise ConfigError("--retry-failed needs the files that --overwrite empties: give one")
        if self.server_flags and self.model_path is None:
            raise ConfigError(
                f"flags after -- ({' '.join(self.server_flags)}) are for a server started with "
                "--model-path"
            )
        if self.via not in VIAS:
            raise ConfigError(f"--via must be one of {', '.join(VIAS)}, not {self.via!r}")
        if self.detach and self.via == "lines":
            raise ConfigError("--detach needs batches of the server: not --via lines")
        for option, is_given in (
            ("--detach", self.detach),
            ("--via batches", self.via == "batches"),
        ):
            if is_given and self.model_path is not None:
                raise ConfigError(
                    f"{option} needs a server that keeps running; --model-path's stops at the end"
                )
            if is_given and self.ordered:
                raise ConfigError(
                    f"{option} and --ordered: results come one batch after the other; sort them, "
                    "or use --via lines"
                )

    @property
    def absent_wait_s(self) -> float:
        """How long to wait at the start if no server listens [s]."""
        return min(ABSENT_WAIT_S, self.max_wait_s) if self.wait_s is None else self.wait_s

    def as_json(self) -> dict[str, Any]:
        """For the report, without the key."""
        return {name: value for name, value in asdict(self).items() if name != "api_key"}


def normal_base_url(text: str) -> str:
    """`http(s)://host[:port][/path]` without the `/v1` that OpenAI clients put at its end."""
    url = text.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"--base-url must look like {DEFAULT_BASE_URL}, not {text!r}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url {text!r}: {error}") from error
    return url


def _at_least(option: str, value: float, least: float) -> None:
    if not value >= least:  # also refuses nan
        raise ConfigError(f"{option} must be at least {least:g}, not {value:g}")
