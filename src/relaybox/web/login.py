"""Logging in and out: a token opens a session, which a cookie keeps."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from relaybox.errors import RelayboxError
from relaybox.web.auth import LOCAL
from relaybox.web.hosts import client_address
from relaybox.web.limits import Attempts
from relaybox.web.problems import Problem
from relaybox.web.session import LIFE, set_cookie
from relaybox.web.templating import here

if TYPE_CHECKING:
    from relaybox.web.app import Web

LOGOUT = "logout"
"""What the audit calls it; a process that begins reads there which sessions were ended."""
PAGE, PAGES = 500, 20
"""Rows that are read at a time, and how often, to find them."""

log = logging.getLogger("relaybox.web")


async def enter(request: Request) -> Response:
    """Open a session with a token."""
    web, form = request.app, request.state.form
    client = client_address(request)
    web.logins.check(client)
    found = web.users.by_token(form.get("token", "").strip())
    if found is None:
        await refused(request, client, web.logins)
        return _again(request, form.get("next"))
    user, _ = found
    admin = await web.service.admin(user.name)
    await admin.note("login", {"from": client})
    log.info("%s logged in from %s", user.name, client)
    response = RedirectResponse(_local(request, form.get("next")), 303)
    set_cookie(request, response, web.sessions.issue(user.name))
    return response


async def leave(request: Request) -> Response:
    """End the session."""
    web = request.app
    if request.state.caller.by == "session":
        ended = web.sessions.end(request.state.caller.session)
        await request.state.admin.note(LOGOUT, {"from": client_address(request), "session": ended})
    response = RedirectResponse(_root(request) + "/login", 303)
    set_cookie(request, response, "")
    return response


async def recall(web: Web) -> None:
    """Know of the sessions that were ended before this process began, as far as they would be good yet."""
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
    """Count wrong credentials, and write them down, unless that is done too often."""
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
        # The refusal stands whether or not it could be written down.
        log.warning("a refused login is not in the audit: %s", type(error).__name__)


def to_login(request: Request) -> Response:
    """Lead a browser to the form, and afterwards back here."""
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{_root(request)}/login?{urlencode({'next': here(request) + query})}", 303)


def _again(request: Request, after: str | None) -> Response:
    form = request.app.login_form
    if form is None:
        raise Problem(401, "The token is wrong.")
    response: Response = form(request, 401, "The token is wrong.", after)
    return response


def _local(request: Request, after: str | None) -> str:
    """A path of ours; whatever could lead elsewhere is not followed."""
    plain = after and after.startswith("/") and not after.startswith("//") and after.isprintable()
    return _root(request) + (after if plain and after and "\\" not in after else "/")


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")
