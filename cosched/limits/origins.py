"""Which web pages may use the server: the key ``access`` of ``COSCHED_CONFIG`` (docs/operate.md).

A browser sends requests of any page to any server that it reaches. It names the page in ``Origin``;
a page whose own name was pointed at this server (DNS rebinding) is told by ``Host``. Requests with
an API key that the server knows are not checked: a foreign page has none.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

ANY = "*"

_PRIVATE_SUFFIXES = (
    *("localhost", "local", "internal", "test", "home.arpa"),
    *("corp", "home", "intranet", "lan", "private", "svc"),
)
"""Names below these are not in the public DNS, so no page on the internet has one."""

_HOSTS, _RESOLVER = Path("/etc/hosts"), Path("/etc/resolv.conf")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Browsers that may use the server without an API key that it knows.

    hosts    names of the server in ``Host``, without port, beside its own, IP addresses, names of
             one label and private ones (``.local``, ``.internal``, ...); ``*``: any
    origins  of web pages, such as ``https://ui.example.com``, beside the server's own and
             of loopback; ``*``: any
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != ANY and not _NAME.fullmatch(host.lower()):
                raise ValueError(
                    f"hosts: {host!r} is no host name such as 'llm.example.com', without scheme "
                    "and port, nor '*'"
                )
        for origin in self.origins:
            if origin not in (ANY, "null") and _normal(origin) is None:
                raise ValueError(
                    f"origins: {origin!r} is no origin such as 'https://ui.example.com' or "
                    "'http://10.0.0.7:8080', without a path, nor '*'"
                )


class Origins:
    """Checks ``Host`` and ``Origin``. own_names: of this machine; tests give theirs."""

    def __init__(self, config: AccessConfig, own_names: Iterable[str] | None = None) -> None:
        names = names_of_machine() if own_names is None else own_names
        self._own = {*names, "localhost"}
        self._hosts = {host.lower() for host in config.hosts}
        self._origins = {_normal(origin) or origin for origin in config.origins}

    def why_foreign_host(self, header: str) -> str | None:
        """Why a request for this ``Host`` is refused; None: it is not."""
        host = host_of(header)
        if not host or ANY in self._hosts or self._is_known(host) or _is_private(host):
            return None
        return (
            f"Host {header!r} is no name of this server: write it into access.hosts, use an IP "
            "address or localhost, or send an API key that the server knows"
        )

    def why_foreign_origin(self, header: str, host_header: str) -> str | None:
        """Why a request of a page with this ``Origin``, for this ``Host``, is refused."""
        if ANY in self._origins or (_normal(header) or header) in self._origins:
            return None
        host = host_of(header.partition("://")[2])
        if host and (self._is_known(host) or _is_loopback(host)):
            return None
        if host and host == host_of(host_header) and self.why_foreign_host(host_header) is None:
            return None
        return (
            f"Origin {header!r} is a web page of another server: write it into access.origins, or "
            "send an API key that the server knows"
        )

    def _is_known(self, host: str) -> bool:
        return host in self._own or host in self._hosts


def host_of(authority: str) -> str:
    """The host of ``host:port``, in lower case; empty where there is none."""
    text = authority.strip().lower()
    if text.startswith("["):  # IPv6
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def names_of_machine() -> set[str]:
    """Its name, alone and in the domains of ``/etc/resolv.conf``, other names beside it in
    ``/etc/hosts``, and their beginnings: ``pod-0.service`` of ``pod-0.service.default.svc``. DNS is
    not asked: an answer may take long."""
    own = socket.gethostname().lower()
    names = {own}
    for aliases in _words(_HOSTS):
        if own in aliases[1:]:
            names.update(aliases[1:])
    for line in _words(_RESOLVER):
        if line[0] in ("domain", "search"):
            names.update(f"{own}.{domain.strip('.')}" for domain in line[1:])
    labels = [name.split(".") for name in names]
    return {".".join(one[:end]) for one in labels for end in range(1, len(one) + 1)}


def _words(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        return []
    return [words for line in lines if (words := line.partition("#")[0].split())]


def _is_private(host: str) -> bool:
    """No page on the internet can have it: an IP address is its own, other names are private."""
    suffixes = tuple(f".{suffix}" for suffix in _PRIVATE_SUFFIXES)
    return "." not in host or _address(host) is not None or host.endswith(suffixes)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.endswith(".localhost") if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _normal(origin: str) -> str | None:
    """An origin with the port of its scheme left out; None: it is none."""
    try:
        parts = urlsplit(origin.lower())
        port = parts.port
    except ValueError:
        return None
    default = {"http": 80, "https": 443}.get(parts.scheme)
    if default is None or not parts.hostname or parts.path or parts.query or parts.fragment:
        return None
    return f"{parts.scheme}://{parts.hostname}" + ("" if port in (None, default) else f":{port}")
