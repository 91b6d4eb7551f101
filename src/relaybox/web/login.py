"""Log in with a token or a login link, which opens a session, and log out.

Limit wrong credentials by client.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relaybox.database.connect import denied
from relaybox.errors import RelayboxError, StoreError
from relaybox.web.auth import COOKIE, LIFE, Sessions, User, Users, authenticate
from relaybox.web.problems import Problem
from relaybox.web.security import client_address, prefix, set_cookie
from relaybox.web.service import Service
from relaybox.web.settings import LOCAL, TOKEN, Known
from relaybox.web.templating import back, page, place

LOGOUT = "logout"
"""The action in the audit, where every process reads which sessions were ended."""
PAGE, PAGES = 100, 100
"""Rows of the audit in a page, and the most pages to read."""
OVERLAP = timedelta(minutes=1)
"""How long before the last row to read again: rows appear when their transactions commit, in any order."""

WINDOW = 60.0
"""Seconds over which wrong credentials are counted."""
MOST = 10
"""Wrong credentials of a client in a window, after which it is refused."""
CLIENTS = 10_000
AUDITED = 20
"""Refused logins in a window that the audit lists; further ones are only counted."""

FOLLOWED = """<!doctype html><title>Relaybox</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0;url={0}"><a href="{0}">Continue</a>
"""
"""The page behind a login link, which leads on to the start page."""

log = logging.getLogger("relaybox.web")


async def login(request: Request, status: int = 200, wrong: str = "", after: str | None = None) -> Response:
    """Log in by the login link; otherwise show the form, with the error of the last attempt."""
    gate, given = request.app.gate, request.query_params.get("token")
    if gate.link is not None and request.method == "GET":
        if given is not None and not wrong:
            return await _follow(request, given)
        gate.link.announce(prefix(request))
    after = request.query_params.get("next") if after is None else after
    return page(request, "login.html", status, wrong=wrong, next=back(after, "/"), linked=bool(gate.link))


async def _follow(request: Request, code: str) -> Response:
    """Open a session with the code of a login link."""
    gate, client = request.app.gate, client_address(request)
    if not gate.link.use(code):
        gate.logins.check(client)
        await gate.refuse(client, gate.logins)
        return await login(request, 401, "The link was used already, or another process printed it.")
    # A redirect would belong to the navigation of the page with the link, for which the browser keeps the
    # cookie back if that page is of another site, such as a terminal in a browser.
    body = FOLLOWED.format(quote(f"{prefix(request)}/", safe="/"))
    return await _open(request, HTMLResponse(body), LOCAL)


async def enter(request: Request) -> Response:
    """Open a session with a token."""
    gate, form = request.app.gate, request.state.form
    client = client_address(request)
    gate.logins.check(client)
    user = gate.users.by_token(form.get("token", "").strip())
    if user is None:
        await gate.refuse(client, gate.logins)
        return await login(request, 401, "The token is wrong.", form.get("next"))
    response = RedirectResponse(prefix(request) + back(form.get("next"), "/"), 303)
    return await _open(request, response, user.name)


async def _open(request: Request, response: Response, name: str) -> Response:
    """Add a new session of this user to the response."""
    client = client_address(request)
    admin = await request.app.service.admin(name)
    try:
        await admin.note("login", {"from": client})
    except StoreError as error:
        # The role `relaybox_viewer` may only read: with it, the dashboard shows and changes nothing.
        if not denied(error.__cause__):
            raise
        log.warning("this login is not in the audit: the database's role may not write it")
    log.info("%s logged in from %s", name, client)
    set_cookie(request, response, COOKIE, request.app.gate.sessions.issue(name), LIFE)
    return response


async def leave(request: Request) -> Response:
    """End the session."""
    user = request.state.user
    if user.by == "session":
        ended = request.app.gate.sessions.end(user.session)
        await request.state.admin.note(LOGOUT, {"from": client_address(request), "session": ended})
    response = RedirectResponse(prefix(request) + "/login", 303)
    set_cookie(request, response, COOKIE, "", 0)
    return response


def to_login(request: Request) -> Response:
    """Redirect to the login form, which leads back here."""
    return RedirectResponse(f"{prefix(request)}/login?{urlencode({'next': place(request)})}", 303)


class Link:
    """The login link if no users are configured: it opens one session, and then another link is made."""

    def __init__(self) -> None:
        self.address = ""
        """The URL of the server, if it is known."""
        self.shown = False
        self._code = secrets.token_urlsafe(24)

    def url(self, prefix: str = "") -> str:
        """Return the link; without the server's URL, it begins with the mount prefix."""
        return f"{self.address}{prefix}/login?{urlencode({'token': self._code})}"

    def use(self, code: str) -> bool:
        """True if this is the code of the link; it is not the next time."""
        right = hmac.compare_digest(code.encode("utf-8", "replace"), self._code.encode())
        if right:
            self._code, self.shown = secrets.token_urlsafe(24), False
        return right

    def announce(self, prefix: str) -> None:
        """Log the link once, unless the environment has a token, with which every process lets in."""
        if not self.shown and TOKEN not in os.environ:
            self.shown = True
            log.warning("no users are configured: log in, once, at %s", self.url(prefix))


class Attempts:
    """Recent wrong credentials by client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, list[float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Raise 429 if there were too many, even if the credentials are right now."""
        recent = self._recent(client)
        if len(recent) >= MOST:
            wait = math.ceil(max(1.0, recent[0] + WINDOW - self._clock()))
            detail = f"Too many wrong credentials; try again in {wait} seconds."
            raise Problem(429, detail, {"retry-after": str(wait)})

    def failed(self, client: str) -> None:
        """Count one more for a client."""
        self._failed[client] = [*self._recent(client), self._clock()][-MOST:]
        self._failed.move_to_end(client)
        while len(self._failed) > CLIENTS:
            self._failed.popitem(last=False)

    def _recent(self, client: str) -> list[float]:
        since = self._clock() - WINDOW
        return [at for at in self._failed.get(client, ()) if at > since]


class Budget:
    """Allow ``most`` uses in a window of time, and count the rest."""

    def __init__(self, most: int = AUDITED, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._began = -math.inf
        self._used = 0
        self.left_out = 0

    def take(self) -> int | None:
        """Return how many were refused since the last allowed one, or None if this one is refused."""
        if self._clock() - self._began >= WINDOW:
            self._began, self._used = self._clock(), 0
        if self._used >= self._most:
            self.left_out += 1
            return None
        self._used += 1
        left_out, self.left_out = self.left_out, 0
        return left_out


class Gate:
    """Say who makes a request; limit wrong credentials by client, and note them in the audit."""

    def __init__(self, known: Iterable[Known], secret: str, service: Service, link: Link | None) -> None:
        self.link = link
        self.users = Users(known)
        self.sessions = Sessions(self.users.by_name.values(), secret)
        self.logins, self.bearers = Attempts(), Attempts()
        self.audited = Budget()
        self._service = service
        self._recalled = datetime.now(UTC) - timedelta(seconds=LIFE)

    @property
    def how(self) -> str:
        """Return how to authenticate."""
        set_it = "" if self.link is None else f" The environment variable {TOKEN} of the server sets one."
        return f"Log in, or send a token: authorization: Bearer TOKEN.{set_it}"

    async def user(self, request: Request, *, required: bool) -> User | None:
        """Return the user; raise if credentials are wrong and a user is required."""
        try:
            user = authenticate(request, self.users, self.sessions)
            if required and user is not None and user.by == "session":
                await self._recall()
                user = authenticate(request, self.users, self.sessions)
            return user
        except Problem:
            if not required:
                return None
            # Only wrong tokens are limited: clients behind one address must not lock each other out.
            client = client_address(request)
            self.bearers.check(client)
            await self.refuse(client, self.bearers)
            raise

    async def refuse(self, client: str, attempts: Attempts) -> None:
        """Count wrong credentials, and add them to the log and the audit within their budget."""
        attempts.failed(client)
        left_out = self.audited.take()
        if left_out is None:
            return
        log.warning("wrong credentials from %s", client)
        details = {"from": client, **({"more": left_out} if left_out else {})}
        try:
            admin = await self._service.admin("unknown")
            await admin.note("login refused", details)
        except RelayboxError as error:
            # The login stays refused even if the audit cannot be written.
            log.warning("a refused login is not in the audit: %s", type(error).__name__)

    async def _recall(self) -> None:
        """Remember the sessions that any process has ended since the last time, from the audit."""
        admin, cursor = await self._service.admin(LOCAL), None
        since = self._recalled - OVERLAP
        for _ in range(PAGES):
            found = await admin.audits(PAGE, cursor)
            for row in found.rows:
                self._recalled = max(self._recalled, row.at)
                if row.action == LOGOUT and isinstance(ended := row.details.get("session"), str):
                    self.sessions.recall(ended)
            if found.cursor is None or found.rows[-1].at < since:
                return
            cursor = found.cursor
