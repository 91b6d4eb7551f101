"""Log in with a token, which opens a session, and log out. Limit wrong credentials by client."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from relaybox.errors import RelayboxError
from relaybox.web.auth import COOKIE, LIFE, LOCAL
from relaybox.web.problems import Problem
from relaybox.web.security import client_address, prefix, set_cookie
from relaybox.web.templating import back, page, place

if TYPE_CHECKING:
    from relaybox.web.app import Web

LOGOUT = "logout"
"""The action in the audit, where a new process reads which sessions were ended."""
PAGE, PAGES = 500, 20
"""Rows of the audit in a page, and the most pages to read."""

WINDOW = 60.0
"""Seconds over which wrong credentials are counted."""
MOST = 10
"""Wrong credentials of a client in a window, after which it is refused."""
CLIENTS = 10_000
AUDITED = 20
"""Refused logins in a window that the audit lists; further ones are only counted."""

log = logging.getLogger("relaybox.web")


async def login(request: Request, status: int = 200, wrong: str = "", after: str | None = None) -> Response:
    """Show the form, with the error of the last attempt."""
    after = request.query_params.get("next") if after is None else after
    return page(request, "login.html", status, wrong=wrong, next=back(after, "/"))


async def enter(request: Request) -> Response:
    """Open a session with a token."""
    web, form = request.app, request.state.form
    client = client_address(request)
    web.logins.check(client)
    user = web.users.by_token(form.get("token", "").strip())
    if user is None:
        await refused(request, client, web.logins)
        return await login(request, 401, "The token is wrong.", form.get("next"))
    admin = await web.service.admin(user.name)
    await admin.note("login", {"from": client})
    log.info("%s logged in from %s", user.name, client)
    response = RedirectResponse(prefix(request) + back(form.get("next"), "/"), 303)
    set_cookie(request, response, COOKIE, web.sessions.issue(user.name), LIFE)
    return response


async def leave(request: Request) -> Response:
    """End the session."""
    user = request.state.user
    if user.by == "session":
        ended = request.app.sessions.end(user.session)
        await request.state.admin.note(LOGOUT, {"from": client_address(request), "session": ended})
    response = RedirectResponse(prefix(request) + "/login", 303)
    set_cookie(request, response, COOKIE, "", 0)
    return response


async def recall(web: Web) -> None:
    """Load unexpired sessions that were ended before this process started, from the audit."""
    admin, cursor = await web.service.admin(LOCAL), None
    since = datetime.now(UTC) - timedelta(seconds=LIFE)
    for _ in range(PAGES):
        found = await admin.audits(PAGE, cursor)
        for row in found.rows:
            if row.action == LOGOUT and isinstance(ended := row.details.get("session"), str):
                web.sessions.recall(ended)
        if found.cursor is None or found.rows[-1].at < since:
            return
        cursor = found.cursor


async def refused(request: Request, client: str, attempts: Attempts) -> None:
    """Count wrong credentials, and add them to the log and the audit within their budget."""
    web = request.app
    attempts.failed(client)
    left_out = web.audited.take()
    if left_out is None:
        return
    log.warning("wrong credentials from %s", client)
    details = {"from": client, **({"more": left_out} if left_out else {})}
    try:
        admin = await web.service.admin("unknown")
        await admin.note("login refused", details)
    except RelayboxError as error:
        # The login stays refused even if the audit cannot be written.
        log.warning("a refused login is not in the audit: %s", type(error).__name__)


def to_login(request: Request) -> Response:
    """Redirect to the login form, which leads back here."""
    return RedirectResponse(f"{prefix(request)}/login?{urlencode({'next': place(request)})}", 303)


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
