"""Where callbacks may go, and the secrets that sign them: `BatchesConfig.callbacks`, checked."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from cosched.batch.config import BatchesConfig, CallbacksConfig
from cosched.batch.errors import ApiError
from cosched.errors import ConfigError, choices

METADATA_KEY = "callback_url"
"""In a batch's metadata: the URL that is told of its end."""
SECRET_ENV = "COSCHED_CALLBACK_SECRET"
_PREFIX = "whsec_"
_LEAST_BYTES, _MOST_BYTES = 24, 64
"""Of a secret, as in the Standard Webhooks specification."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SECRET = f"a secret is {_PREFIX!r} and {_LEAST_BYTES} to {_MOST_BYTES} bytes in base64"


class RefusedUrlError(ValueError):
    """A callback may not go there."""


class CallbackRules:
    """Read-only."""

    def __init__(
        self, config: BatchesConfig, settings: CallbacksConfig, environ: Mapping[str, str]
    ) -> None:
        """Reads the secrets. ConfigError."""
        self.settings = settings
        self._networks = tuple(map(ipaddress.ip_network, settings.allow_networks))
        for url in settings.urls:
            try:
                self.checked(url)
            except RefusedUrlError as error:
                raise ConfigError(f"batches.callbacks.urls: {error}") from None
        self._secrets = _server_secrets(settings, environ)
        self._of_owner: dict[str, Sequence[bytes]] = {}
        for name, file in settings.owner_secret_files.items():
            if name not in config.owners:
                raise ConfigError(
                    f"batches.callbacks.owner_secret_files: unknown owner {name!r}; choose from "
                    f"{choices(config.owners)} (batches.owners)"
                )
            key = config.owners[name][0].removeprefix("sha256:")
            self._of_owner[key] = _secrets_in(file, f"owner_secret_files.{name}")

    def secrets(self, owner: str) -> Sequence[bytes]:
        """That sign callbacks of an owner's batches."""
        return self._of_owner.get(owner, self._secrets)

    def check_metadata(self, metadata: Mapping[str, str] | None) -> None:
        """ApiError 400: a callback may not go to the URL of a new batch."""
        url = (metadata or {}).get(METADATA_KEY)
        if url is None or not self.settings.allow_client_urls:
            return
        try:
            self.checked(url)
        except RefusedUrlError as error:
            param = f"metadata.{METADATA_KEY}"
            raise ApiError(f"{param}: {error}", param=param, code="invalid_value") from None

    def urls_of(self, metadata: Mapping[str, str] | None) -> dict[str, bool]:
        """URL -> whether the batch names it, for a batch with that metadata."""
        found = dict.fromkeys(self.settings.urls, False)
        url = (metadata or {}).get(METADATA_KEY)
        if url is not None and self.settings.allow_client_urls:
            found.setdefault(url, True)
        return found

    def checked(self, text: str) -> httpx.URL:
        """RefusedUrlError: not a URL to which callbacks may go. A host name is not looked up."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL as error:
            raise RefusedUrlError(f"not a URL: {error}") from None
        schemes = ("https", "http") if self.settings.allow_http else ("https",)
        if url.scheme not in schemes or not url.host:
            raise RefusedUrlError(
                f"must begin with {' or '.join(f'{scheme}://HOST' for scheme in schemes)}, not "
                f"{f'{url.scheme}://{url.host}'!r} (batches.callbacks.allow_http)"
            )
        if url.userinfo or url.fragment:
            raise RefusedUrlError("may have no user, no password and no fragment")
        literal = _address(url.host)
        if literal is not None and not self._is_allowed(literal):
            raise RefusedUrlError(
                f"the address {literal} is not public (batches.callbacks.allow_networks)"
            )
        return url

    def addresses(self, url: httpx.URL) -> list[str]:
        """Of its host, those that may be called; blocks. RefusedUrlError: none."""
        port = url.port or {"https": 443, "http": 80}[url.scheme]
        try:
            found = socket.getaddrinfo(host_of(url), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS may have
            raise RefusedUrlError(f"the host name is not known: {error}") from None
        known = (_address(str(entry[4][0])) for entry in found)
        allowed = [str(one) for one in known if one is not None and self._is_allowed(one)]
        if not allowed:
            raise RefusedUrlError(
                "the host has no public address (batches.callbacks.allow_networks)"
            )
        return list(dict.fromkeys(allowed))

    def _is_allowed(self, address: _Address) -> bool:
        return any(address in network for network in self._networks) or _is_public(address)


def callback_rules(
    config: BatchesConfig, environ: Mapping[str, str] = os.environ
) -> CallbackRules | None:
    """None: the server sends no callbacks. ConfigError."""
    if config.callbacks is None:
        return None
    return CallbackRules(config, config.callbacks, environ)


def host_of(url: httpx.URL) -> str:
    """Its host as DNS and TLS have it."""
    return url.raw_host.decode("ascii")


def _address(host: str) -> _Address | None:
    """IPv4 in IPv6 is IPv4; None: a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_public(address: _Address) -> bool:
    """Neither private, loopback, link-local, shared nor multicast, nor a way to such a one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.is_site_local or (inner is not None and not _is_public(inner)):
            return False
    return address.is_global and not address.is_multicast


def _server_secrets(settings: CallbacksConfig, environ: Mapping[str, str]) -> Sequence[bytes]:
    if settings.secret_file is not None:
        return _secrets_in(settings.secret_file, "secret_file")
    if not environ.get(SECRET_ENV, "").strip():
        raise ConfigError(
            f"batches.callbacks: no secret; name a secret_file, or set {SECRET_ENV}: {_SECRET} "
            f"(echo {_PREFIX}$(openssl rand -base64 32))"
        )
    return _secrets(environ[SECRET_ENV], SECRET_ENV)


def _secrets_in(file: str, key: str) -> Sequence[bytes]:
    where = f"batches.callbacks.{key}"
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} {file!r} cannot be read: {error}") from None
    return _secrets(text, where)


def _secrets(text: str, where: str) -> Sequence[bytes]:
    found = tuple(_each_secret(text.split(), where))
    if not found:
        raise ConfigError(f"{where} is empty; {_SECRET}")
    return found


def _each_secret(words: Sequence[str], where: str) -> Iterator[bytes]:
    """The error names their place: a wrong secret may be another one."""
    for number, word in enumerate(words, start=1):
        try:
            secret = base64.b64decode(word.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if not word.startswith(_PREFIX) or not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
            raise ConfigError(f"{where}: number {number} is no secret; {_SECRET}")
        yield secret
