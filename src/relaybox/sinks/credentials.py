"""What is secret about a webhook destination: what signs, what authenticates, what no message may show."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import NamedTuple

from yarl import URL

from relaybox.core.settings import Destination, Secret
from relaybox.core.values import mask_url
from relaybox.errors import ConfigError
from relaybox.wire.signature import Key, parse_keys


class Credentials(NamedTuple):
    """The secrets of a destination, as they were last read."""

    keys: tuple[Key, ...]
    headers: dict[str, str]
    texts: tuple[str, ...]
    """All that may not appear in a message, though a receiver may echo it."""


def parse_url(destination: Destination) -> URL:
    """The URL of the destination's sink; raises ``ConfigError``."""
    setting = f"destination {destination.name!r}: sink"
    try:
        url = URL(destination.sink)
        host, port = url.raw_host, url.port
    except ValueError:
        # Not chained: its message shows the URL, password and all.
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} is not a valid URL") from None
    if not host or not port:
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} names no host")
    if url.raw_user is not None and destination.auth is not None:
        raise ConfigError(f"{setting} holds a user, and auth is set too; keep one of them")
    return url


def read_credentials(destination: Destination, url: URL) -> Credentials:
    """The secrets as they are now; raises ``ConfigError`` where one is missing or malformed."""
    signing = _reveal(destination, "secret")
    token = _reveal(destination, "auth")
    headers = {}
    if token:
        headers["authorization"] = f"Bearer {token}"
    elif url.raw_user is not None:
        pair = f"{url.user or ''}:{url.password or ''}"
        headers["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    texts = _texts(signing, token, headers.get("authorization", ""), url)
    return Credentials(_keys(destination, signing), headers, texts)


def _texts(signing: str, token: str, authorization: str, url: URL) -> tuple[str, ...]:
    secrets = signing.split()
    texts = [*secrets, *(secret.partition("_")[2] for secret in secrets)]
    texts += [token, authorization.partition(" ")[2], url.password or "", url.raw_password or ""]
    texts += [url.raw_query_string, url.query_string, *url.query.values()]
    # The longest first, so that none is left in part; the shortest would hide half of every message.
    return tuple(sorted({text for text in texts if len(text) > 3}, key=len, reverse=True))


def _reveal(destination: Destination, name: str) -> str:
    secret: Secret | None = getattr(destination, name)
    try:
        text = "" if secret is None else secret.reveal()
    except ConfigError as error:
        raise ConfigError(f"destination {destination.name!r}: {name}: {error}") from None
    if name == "auth" and not re.fullmatch(r"[!-~]*", text):
        raise ConfigError(f"destination {destination.name!r}: auth holds what no header may; write a token")
    return text


def _keys(destination: Destination, secret: str) -> tuple[Key, ...]:
    where = f"destination {destination.name!r}: secret"
    try:
        keys = parse_keys(secret) if secret else ()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if any(key.sign is None for key in keys):
        raise ConfigError(f"{where} holds a public key, which receivers verify with; write the private one")
    return keys
