"""Sign and verify webhooks as Standard Webhooks specifies: https://www.standardwebhooks.com.

The signed content is ``webhook-id.webhook-timestamp.body``. The header ``webhook-signature`` holds one
signature per secret, separated by spaces, so a secret can be replaced while receivers still hold the old one.
``docs/how-to/receive.md`` lists the kinds of secrets.
"""

from __future__ import annotations

import hmac
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from relaybox.core.values import UNTIL
from relaybox.errors import ConfigError, MissingExtra

ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
SIGNATURE = "webhook-signature"

_MOST_SIGNATURES = 32
"""Signatures of a header that are checked; more would only cost time."""


class Key(NamedTuple):
    """The functions that sign and verify with one secret; a public key has no ``sign``."""

    version: str
    sign: Callable[[bytes], bytes] | None
    check: Callable[[bytes, bytes], bool]
    until: float = math.inf
    """Seconds since 1970 from which it neither signs nor verifies."""


def parse_keys(secrets: str | Iterable[str]) -> tuple[Key, ...]:
    """Parse secrets: a list, or text separated by spaces. Raise ``ConfigError`` without showing any.

    ``until:2026-12-31`` behind a secret is the last day, in UTC, on which it signs and verifies.
    """
    texts = secrets.split() if isinstance(secrets, str) else [text.strip() for text in secrets]
    if not texts or not all(texts):
        raise ConfigError("the secret is empty; write at least one")
    keys: list[Key] = []
    for text in texts:
        if not text.startswith(UNTIL):
            keys.append(_parse_key(text))
        elif keys and keys[-1].until == math.inf:
            keys[-1] = keys[-1]._replace(until=_end_of(text.removeprefix(UNTIL)))
        else:
            raise ConfigError(f"{UNTIL} stands behind no secret; write it behind the one that expires")
    if all(key.until < math.inf for key in keys):
        raise ConfigError(f"every secret expires; write one without {UNTIL}, which takes over")
    return tuple(keys)


def sign(keys: Iterable[Key], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of ``webhook-signature``: one signature for each key."""
    message = _message(message_id, str(timestamp), body)
    return " ".join(
        [
            f"{key.version},{b64encode(key.sign(message)).decode()}"
            for key in keys
            if key.sign and timestamp < key.until
        ]
    )


def verify(
    body: bytes | str,
    headers: Mapping[Any, Any],
    secrets: str | Iterable[str],
    *,
    tolerance: float = 300,
    now: float,
) -> bool:
    """True if one of the secrets signed the message, no more than ``tolerance`` seconds from ``now``.

    ``headers`` are the request's: names in any case, text or bytes. Bad headers return False and never raise.
    ``now`` is in seconds since 1970. Raise ``ConfigError`` if a secret is malformed.
    """
    keys = parse_keys(secrets)
    found = {_text(name).lower(): _text(value).strip() for name, value in headers.items()}
    message_id, timestamp, signatures = (found.get(name, "") for name in (ID, TIMESTAMP, SIGNATURE))
    # With a full stop in it, the id could hold the timestamp of another message.
    if not message_id or "." in message_id or not is_recent(timestamp, tolerance, now):
        return False
    content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    message = _message(message_id, timestamp, content)
    matched = False
    for version, signature in _split(signatures):
        for key in keys:
            # No early return: the time taken must not reveal which one matched.
            matched |= version == key.version and now < key.until and key.check(message, signature)
    return matched


def is_recent(timestamp: str, tolerance: float, now: float) -> bool:
    """True if the text is a number of seconds since 1970, at most ``tolerance`` from ``now``."""
    if not re.fullmatch(r"[0-9]{1,15}", timestamp, re.ASCII):
        return False
    return abs(now - int(timestamp)) <= tolerance


def _message(message_id: str, timestamp: str, body: bytes) -> bytes:
    return b"%b.%b.%b" % (message_id.encode("utf-8", "surrogatepass"), timestamp.encode(), body)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else ""


def _split(signatures: str) -> list[tuple[str, bytes]]:
    found = []
    for signature in signatures.split(maxsplit=_MOST_SIGNATURES)[:_MOST_SIGNATURES]:
        version, _, encoded = signature.partition(",")
        try:
            found.append((version, b64decode(encoded, validate=True)))
        except ValueError:
            continue
    return found


def _end_of(day: str) -> float:
    try:
        last = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC)
        return (last + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{UNTIL} is not followed by a date; write {UNTIL}2026-12-31") from None


def _parse_key(text: str) -> Key:
    prefix, _, encoded = text.partition("_")
    kind = {"whsec": _symmetric, "whsk": _private, "whpk": _public}.get(prefix)
    return _symmetric(text.encode()) if kind is None else kind(_decode(prefix, encoded))


def _decode(prefix: str, encoded: str) -> bytes:
    try:
        key = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        key = b""
    if not key:
        raise ConfigError(f"what follows {prefix}_ in the secret is not base64; write the key as issued")
    return key


def _symmetric(key: bytes) -> Key:
    # Hash the key once, not for every message.
    prepared = hmac.new(key, digestmod="sha256")

    def digest(message: bytes) -> bytes:
        mac = prepared.copy()
        mac.update(message)
        return mac.digest()

    return Key("v1", digest, lambda message, signature: hmac.compare_digest(digest(message), signature))


def _private(key: bytes) -> Key:
    ed25519 = _ed25519()
    # NaCl appends the public key to the private one.
    if len(key) not in (32, 64):
        raise ConfigError(f"the ed25519 key after whsk_ has {len(key)} bytes; it must have 32 or 64")
    private = ed25519.Ed25519PrivateKey.from_private_bytes(key[:32])
    public = private.public_key().public_bytes_raw()
    if key[32:] not in (b"", public):
        problem = "the key after whsk_ is damaged: its second half is not the public key of its first half"
        raise ConfigError(f"{problem}; copy the whole key again from where it was created")
    return Key("v1a", private.sign, _public(public).check)


def _public(key: bytes) -> Key:
    ed25519 = _ed25519()
    if len(key) != 32:
        raise ConfigError(f"the ed25519 key after whpk_ has {len(key)} bytes; it must have 32")
    public = ed25519.Ed25519PublicKey.from_public_bytes(key)

    def check(message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return Key("v1a", None, check)


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("cryptography", "http") from None
    return ed25519
