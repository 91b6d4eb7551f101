"""Check hosts, origins and CSRF tokens, and set cookies and security headers.

Two checks stop other sites from making a browser change anything here:
``Origin`` and ``Sec-Fetch-Site`` must name this site, and the request must carry a CSRF token. The token
belongs to the session; before login, it is a random value in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from relaybox.core.values import parsed
from relaybox.web.problems import Problem
from relaybox.web.settings import address_of, is_loopback

HEADER = "x-csrf-token"
FIELD = "csrf"
FORM_COOKIE = "relaybox_form"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
"""Headers of every response, unless it sets its own."""

HSTS = {"strict-transport-security": "max-age=31536000"}
"""Makes browsers use TLS for this host for a year."""

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::([0-9]{1,5}))?")
_FORM_TOKEN = re.compile(r"[0-9a-f]{64}")


def check_host(request: Request, hosts: Collection[str]) -> None:
    """Raise if ``hosts`` are configured and the ``Host`` header names neither one of them nor loopback."""
    name = _host_name(request)
    if hosts and name not in hosts and not is_loopback(name):
        raise Problem(421, f"This server does not answer to {name!r}; add it to hosts of the [web] table.")


def _host_name(request: Request) -> str:
    """Return the name in the ``Host`` header without the port; raise if it is missing or malformed."""
    given = request.headers.getlist("host")
    match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise Problem(400, "The Host header is missing or malformed.")
    return (match[1] or match[2]).lower().rstrip(".")


def check_origin(request: Request) -> None:
    """Raise if another site made the browser send a request that changes something."""
    if request.method in SAFE:
        return
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        raise Problem(403, f"A request of another site (sec-fetch-site: {site[:20]!r}) changes nothing here.")
    origin = request.headers.get("origin")
    if origin is not None and not _same(origin, request):
        raise Problem(403, "A request from another origin changes nothing here.")


def _same(origin: str, request: Request) -> bool:
    """True if the origin has our host. Schemes may differ: behind a TLS proxy, a server sees only http."""
    parts = parsed(urlsplit, origin)
    port = None if parts is None else {"http": ":80", "https": ":443"}.get(parts.scheme)
    if parts is None or port is None or not parts.netloc:
        return False
    host = request.headers.get("host", "").lower()
    return parts.netloc.lower().removesuffix(port) == host.removesuffix(port)


class Csrf:
    """Create and check CSRF tokens."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, session: str) -> str:
        """Return the token of a session."""
        return hmac.digest(self._key, b"csrf\0" + session.encode(), "sha256").hex()

    def shown(self, request: Request, session: str) -> str:
        """Return the token for the forms of a page: the session's, or the cookie's before login."""
        return self.token(session) if session else _kept(request) or secrets.token_hex(32)

    def check(self, request: Request, session: str, given: str) -> None:
        """Raise unless ``given`` is the session's token, or the cookie's before login."""
        wanted = self.token(session) if session else _kept(request)
        if not wanted or not hmac.compare_digest(wanted.encode(), given.encode("utf-8", "replace")):
            fix = f"send it as the header {HEADER} or the field {FIELD}; a page that is loaded again has one"
            raise Problem(403, f"The CSRF token is missing or wrong: {fix}.")


def keep_form_token(request: Request, response: Response) -> None:
    """Set the cookie with the page's token for a browser without a session."""
    user, token = getattr(request.state, "user", None), getattr(request.state, "csrf", "")
    if token and (user is None or not user.session) and _kept(request) != token:
        set_cookie(request, response, FORM_COOKIE, token)


def _kept(request: Request) -> str:
    given = request.cookies.get(FORM_COOKIE, "")
    return given if _FORM_TOKEN.fullmatch(given) else ""


def set_cookie(
    request: Request, response: Response, name: str, value: str, max_age: int | None = None
) -> None:
    """Set a cookie for this application only, which no script can read."""
    response.set_cookie(
        name,
        value,
        max_age=max_age,
        path=prefix(request) or "/",
        # A TLS proxy may not announce itself: then the origin shows the browser's scheme.
        secure=request.url.scheme == "https"
        or request.headers.get("origin", "").lower().startswith("https://"),
        httponly=True,
        samesite="strict",
    )


def prefix(request: Request) -> str:
    """Return the path under which the application is mounted, without a trailing slash."""
    return str(request.scope.get("root_path", ""))


def client_address(request: Request) -> str:
    """Return the client's address; for IPv6 its /64 network, because a host has many addresses."""
    host = request.client.host if request.client is not None else ""
    address = address_of(host.partition("%")[0])
    if address is None:
        return host[:100]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def securing(send: Send, scheme: str) -> Send:
    """Return a ``send`` that adds ``HEADERS`` to the response, and over TLS also ``HSTS``."""
    added = HEADERS | HSTS if scheme == "https" else HEADERS

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            for name, value in added.items():
                headers.setdefault(name, value)
            message = {**message, "headers": headers.raw}
        await send(message)

    return secured
