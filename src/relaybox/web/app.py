"""The web as one ASGI application: every request goes through the same steps, in the same order.

    its host → its route → who asks → whether they may → what it says → the endpoint → the answer

It is mounted under any prefix, with or without its lifespan.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from starlette.datastructures import State
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaybox.outbox import Outbox
from relaybox.web import csrf, hosts, login, read, render
from relaybox.web.auth import Caller, User, Users, authenticate, unauthorized
from relaybox.web.cursor import Cursors
from relaybox.web.headers import securing
from relaybox.web.limits import Attempts, Budget
from relaybox.web.problems import Problem, translate
from relaybox.web.redact import Rules
from relaybox.web.route import Found, Route, Table, segments_of
from relaybox.web.service import Service
from relaybox.web.session import COOKIE, Sessions, derived
from relaybox.web.settings import WebSettings

PATIENCE = 30.0
"""Seconds that an endpoint has for its answer."""

ErrorPage = Callable[[Request, int, str, str], Response]
LoginForm = Callable[[Request, int, str, str | None], Response]


class Web:
    """What is served for one outbox; ``dashboard`` and ``api`` of ``relaybox.web`` make it."""

    def __init__(
        self,
        outbox: Outbox,
        settings: WebSettings,
        routes: Iterable[Route],
        error_page: ErrorPage | None = None,
        login_form: LoginForm | None = None,
    ) -> None:
        known, secret = settings.reveal(), settings.revealed_secret()
        tokens = [token for user in known for token in user.tokens]
        self.outbox = outbox
        self.settings = settings
        self.table = Table(routes)
        self.service = Service(outbox)
        self.users = Users(known)
        self.sessions = Sessions(known, secret)
        known_key = bool(secret or tokens)
        self.csrf = csrf.Csrf(derived(secret, "csrf", *tokens) if known_key else _own_key())
        self.cursors = Cursors(derived(secret, "cursor", *tokens) if known_key else _own_key())
        self.logins, self.bearers = Attempts(), Attempts()
        self.audited = Budget()
        self.rules = Rules.of(settings.redact)
        self.login_form = login_form
        self.state = State()
        self._error_page = error_page
        self._recalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request({**scope, "app": self, "state": {}, "path_params": {}}, receive)
            response = await self._respond(request)
            if response is not None:
                await _send(response, request, securing(send))
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def __aenter__(self) -> Web:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of what requests opened: for applications that mount it, whose lifespan is their own."""
        self.end_streams()
        await self.service.close()
        # Whoever starts it again gets a round of its own, as requests open the service again.
        self.state.live = None

    def end_streams(self) -> None:
        """End what would keep a server from shutting down."""
        live = getattr(self.state, "live", None)
        if live is not None:
            live.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _respond(self, request: Request) -> Response | None:
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return None
        except Exception as error:
            return self._refusal(request, translate(error))

    def _refusal(self, request: Request, problem: Problem) -> Response:
        if self._error_page is None or not wants_html(request):
            return problem.response()
        response = self._error_page(request, problem.status, problem.title, problem.detail)
        response.headers.update(problem.headers)
        return response

    async def _answer(self, request: Request) -> Response:
        found = self.table.find(request.method, segments_of(request.scope), html=wants_html(request))
        self._check_host(request, found)
        route = _route(request, found)
        if route is None:
            return Response(status_code=204, headers={"allow": ", ".join(found.allow)})
        request.scope["path_params"] = dict(found.params)
        csrf.check_origin(request)
        caller = await self._caller(request, route)
        request.state.user = None if caller is None else caller.user
        request.state.caller = caller
        request.state.csrf = self.csrf.shown(request, "" if caller is None else caller.session)
        if route.role is not None:
            if caller is None:
                return self._stranger(request)
            await self._admit(request, route, caller.user)
        await self._read(request, route, caller)
        async with asyncio.timeout(PATIENCE):
            answered = await route.endpoint(request)
        return answered if isinstance(answered, Response) else render.answer(answered, route.status)

    def _check_host(self, request: Request, found: Found) -> None:
        if not self.users:
            hosts.check_local(request)
        elif found.route is None or found.route.kind != "open":
            # What watches over a process asks for it by its address.
            hosts.check_host(request, self.settings.hosts)

    async def _caller(self, request: Request, route: Route) -> Caller | None:
        if self.users and not self._recalled and COOKIE in request.cookies and route.role is not None:
            await login.recall(self)
            self._recalled = True
        try:
            return authenticate(request, self.users, self.sessions)
        except Problem:
            if route.role is None:
                return None
            # A right token passes at any time: others behind the same address may show wrong ones.
            client = hosts.client_address(request)
            self.bearers.check(client)
            await login.refused(request, client, self.bearers)
            raise

    def _stranger(self, request: Request) -> Response:
        if self.login_form is not None and wants_html(request) and request.method in csrf.SAFE:
            return login.to_login(request)
        raise unauthorized("Log in, or send a token: authorization: Bearer TOKEN.")

    async def _admit(self, request: Request, route: Route, user: User) -> None:
        if not user.may(route.role):
            raise Problem(403, f"This takes the role {route.role}; {user.name} is a {user.role}.")
        request.state.admin = await self.service.admin(user.name)

    async def _read(self, request: Request, route: Route, caller: Caller | None) -> None:
        """What the request says, as the route takes it; a change must carry a token where a browser asks."""
        if route.kind == "api":
            request.state.query = read.query(request, route.query)
        if route.method == "GET":
            return
        given = request.headers.get(csrf.HEADER, "")
        if route.kind == "page":
            request.state.form = await read.form(request)
            given = given or request.state.form.get(csrf.FIELD, "")
        if route.kind == "page" or (caller is not None and caller.by == "session"):
            self.csrf.check(request, "" if caller is None else caller.session, given)
        if route.kind == "api":
            request.state.body = await read.body(request, route.body)


def _own_key() -> bytes:
    """Without users and a secret there is nothing to make a key of; each process has its own."""
    return secrets.token_bytes(32)


def wants_html(request: Request) -> bool:
    """Whether a browser asks, to show the answer to somebody."""
    return "text/html" in request.headers.get("accept", "").lower()


def _route(request: Request, found: Found) -> Route | None:
    """The route; None: its methods are asked for. Raises where there is none."""
    if not found.allow:
        raise Problem(404, "There is nothing at this address.")
    if request.method == "OPTIONS":
        return None
    if found.route is None:
        allow = ", ".join(found.allow)
        raise Problem(405, f"This address takes {allow}.", {"allow": allow})
    return found.route


async def _send(response: Response, request: Request, send: Send) -> None:
    if request.method != "HEAD":
        await response(request.scope, request.receive, send)
        return
    # Not by way of the response: one that streams would never end.
    await send(
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    await send({"type": "http.response.body", "body": b""})


def make(outbox: Outbox, routes: Iterable[Route], given: dict[str, Any], **faces: Any) -> Web:
    """The application for an outbox, by its ``[web]`` table and what is given in code before it."""
    return Web(outbox, WebSettings.of(outbox.settings.web, **given), routes, **faces)
