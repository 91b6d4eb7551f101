"""Cross-site requests: who may make a browser do something here.

Two fences. A browser says where a request comes from (``Origin``, ``Sec-Fetch-Site``), and every request
that changes anything must come from here. And a form or script must send a token that only a page of this
session was given; before a login, what a cookie of the browser holds, made of nothing but chance.
"""

from __future__ import annotations

import hmac
import re
import secrets
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.hosts import over_tls
from relaybox.web.problems import Problem

HEADER = "x-csrf-token"
FIELD = "csrf"
COOKIE = "relaybox_form"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

_OWN = re.compile(r"[0-9a-f]{64}")


class Csrf:
    """Makes the tokens of sessions, and compares them."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, session: str) -> str:
        """The token of a session."""
        return hmac.digest(self._key, b"csrf\0" + session.encode(), "sha256").hex()

    def shown(self, request: Request, session: str) -> str:
        """What the forms of a page carry: the session's token, or what the browser's cookie will hold."""
        return self.token(session) if session else _kept(request) or secrets.token_hex(32)

    def check(self, request: Request, session: str, given: str) -> None:
        """Raise unless it is the session's token, or that of the browser's cookie."""
        wanted = self.token(session) if session else _kept(request)
        if not wanted or not hmac.compare_digest(wanted.encode(), given.encode("utf-8", "replace")):
            fix = f"send it as the header {HEADER} or the field {FIELD}; a page loaded anew has one"
            raise Problem(403, f"The CSRF token is missing or wrong: {fix}.")


def keep(request: Request, response: Response) -> None:
    """Let the browser of somebody without a session keep the token of the page that it is sent."""
    caller, token = getattr(request.state, "caller", None), getattr(request.state, "csrf", "")
    if not token or (caller is not None and caller.session) or _kept(request) == token:
        return
    response.set_cookie(
        COOKIE,
        token,
        path=str(request.scope.get("root_path", "")).rstrip("/") or "/",
        secure=over_tls(request),
        httponly=True,
        samesite="strict",
    )


def _kept(request: Request) -> str:
    given = request.cookies.get(COOKIE, "")
    return given if _OWN.fullmatch(given) else ""


def check_origin(request: Request) -> None:
    """Raise where a browser says that another site makes it ask for a change."""
    if request.method in SAFE:
        return
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        raise Problem(403, f"A request of another site (sec-fetch-site: {site[:20]!r}) changes nothing here.")
    origin = request.headers.get("origin")
    if origin is not None and not _same(origin, request):
        raise Problem(403, "A request from another origin changes nothing here.")


def _same(origin: str, request: Request) -> bool:
    """Whether the browser sees the same host there as here.

    The scheme is not compared: behind a proxy that ends TLS, a server does not know its own.
    """
    try:
        parts = urlsplit(origin)
        given = parts.netloc.lower()
    except ValueError:
        return False
    host = request.headers.get("host", "").lower()
    ports = {"http": ":80", "https": ":443"}
    if parts.scheme not in ports or not given:
        return False
    default = ports[parts.scheme]
    return given.removesuffix(default) == host.removesuffix(default)
