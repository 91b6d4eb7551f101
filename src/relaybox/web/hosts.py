"""Which names this server answers to, so that no page of elsewhere reaches it under a name of its own."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import Request

from relaybox.web.problems import Problem
from relaybox.web.settings import is_loopback

FORWARDED = frozenset({
    "forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "cf-connecting-ip",
    "true-client-ip",
})  # fmt: skip
FORWARDING = ("x-forwarded-", "x-original-")
"""Names, and how names begin, that proxies give to headers of theirs."""

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")


def host_name(request: Request) -> str:
    """The name in the ``Host`` header, without the port; raises where there is none."""
    given = request.headers.getlist("host")
    match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise Problem(400, "The Host header is missing or malformed.")
    return (match[1] or match[2]).lower().rstrip(".")


def check_host(request: Request, hosts: Collection[str]) -> None:
    """Raise where it is asked for by a name that is not its own."""
    name = host_name(request)
    if hosts and name not in hosts and not is_loopback(name):
        raise Problem(421, f"This server does not answer to {name!r}; add it to hosts of the [web] table.")


def check_local(request: Request) -> None:
    """Without users, only this host is served: raise where anybody else could have asked."""
    fix = "configure users ([web.users.NAME]) to be asked from elsewhere"
    client = request.client
    if client is None or not is_loopback(client.host):
        raise Problem(403, f"Only this host is served; {fix}.")
    if not is_loopback(host_name(request)):
        raise Problem(421, f"Only names of this host, such as localhost, are answered; {fix}.")
    # Version 1.0 is what proxies speak that say nothing else of themselves, and no browser.
    if request.scope.get("http_version") == "1.0" or any(map(_of_proxy, request.headers)):
        raise Problem(403, f"A proxy asks for somebody else; {fix}.")
    if not all(_loopback_url(request.headers.get(name, "")) for name in ("origin", "referer")):
        raise Problem(403, f"A page of another host asks; {fix}.")


def _of_proxy(header: str) -> bool:
    name = header.lower().replace("_", "-")
    return name in FORWARDED or name.startswith(FORWARDING)


def _loopback_url(text: str) -> bool:
    """Whether it names this host, or nothing at all."""
    try:
        return not text or is_loopback(urlsplit(text).hostname or "")
    except ValueError:
        return False


def over_tls(request: Request) -> bool:
    """Whether the browser speaks TLS, with this server or with a proxy that does not say so."""
    return request.url.scheme == "https" or request.headers.get("origin", "").lower().startswith("https://")


def client_address(request: Request) -> str:
    """Whose logins are counted together: an address, or a network of IPv6, where one host has many."""
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:100]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)
