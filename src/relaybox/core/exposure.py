"""Find destinations whose events or secrets others could read, forge or find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from relaybox.core.settings import Destination
from relaybox.core.values import is_reference
from relaybox.errors import ConfigError

_LOCAL = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc", ".test")
"""Ends of names that no public server has."""


class Exposure(NamedTuple):
    """What is exposed, why that matters, and the fix."""

    title: str
    detail: str
    fix: str


def exposures(destination: Destination, env: Mapping[str, str]) -> Iterator[Exposure]:
    """Yield what is exposed; a secret that is also in the environment was read from there by the caller."""
    name = destination.name
    parts = _parts(destination)
    if parts and destination.scheme in ("http", "https") and _public(parts.hostname or "", destination):
        if destination.scheme == "http":
            detail = "anyone on the way can read and change its events, and read its token"
            yield Exposure(
                f"destination {name!r} is public and has no TLS", detail, "write https:// in its sink"
            )
        secret_url = is_reference(destination.sink) or parts.username
        if not (destination.secret or destination.auth or secret_url):
            detail = "its receiver cannot tell our events from forged ones"
            fix = 'set secret = "env:NAME" and verify it there; if the URL is the secret: sink = "env:NAME"'
            yield Exposure(f"destination {name!r} is public and its events are not signed", detail, fix)
    given = {"secret": destination.secret, "auth": destination.auth}
    inline = [setting for setting, secret in given.items() if secret is not None and secret.inline(env)]
    if parts and parts.password and not is_reference(destination.sink) and parts.password not in env.values():
        inline.append("sink")
    for setting in inline:
        detail = "anyone who can read the settings, or a copy of them, has it"
        fix = "write env:NAME or file:PATH instead, and then replace the secret"
        yield Exposure(f"{setting} of destination {name!r} is a secret in the settings", detail, fix)


def _parts(destination: Destination) -> SplitResult | None:
    try:
        return urlsplit(destination.url)
    except (ConfigError, ValueError):
        # Other checks report it.
        return None


def _public(host: str, destination: Destination) -> bool:
    """True if the host is a public address, or a name that is probably not of the own network."""
    try:
        return ip_address(host).is_global
    except ValueError:
        own = destination.allow or host.endswith(_LOCAL)
        return "." in host and not own
