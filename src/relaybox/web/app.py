"""The web as one ASGI application, mounted under any prefix, with or without its lifespan.

A Starlette router finds what is served at a path. Then every request takes the same steps, in this order:

    its route → its host → its origin → who asks → whether they may → what it says → the endpoint → the answer
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

from starlette import routing
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaybox.outbox import Outbox
from relaybox.web import auth, login, read, security
from relaybox.web.endpoints import answer
from relaybox.web.live import Live
from relaybox.web.problems import Problem, translate
from relaybox.web.redact import Rules
from relaybox.web.routes import Route
from relaybox.web.service import Service
from relaybox.web.settings import WebSettings
from relaybox.web.templating import error_page

PATIENCE = 30.0
"""Seconds that an endpoint has for its answer."""


class Web:
    """What is served for one outbox; ``dashboard`` and ``api`` of ``relaybox.web`` make it."""

    def __init__(self, outbox: Outbox, settings: WebSettings, routes: Iterable[Route]) -> None:
        known, secret = settings.reveal(), settings.revealed_secret()
        tokens = [token for user in known for token in user.tokens]

        def key(purpose: str) -> bytes:
            # Without users and a secret there is nothing to make a key of: each process has its own.
            return auth.derived(secret, purpose, *tokens) if secret or tokens else token_bytes(32)

        self.outbox = outbox
        self.settings = settings
        self.routes = tuple(routes)
        self.service = Service(outbox)
        self.users = auth.Users(known)
        self.sessions = auth.Sessions(known, secret)
        self.csrf = security.Csrf(key("csrf"))
        self.cursors = auth.Cursors(key("cursor"))
        self.logins, self.bearers = login.Attempts(), login.Attempts()
        self.audited = login.Budget()
        self.rules = Rules.of(settings.redact)
        self.live = Live()
        self._has_pages = any(route.kind == "page" for route in self.routes)
        self._recalled = False
        self._router = routing.Router(
            [routing.Route(path, _Address(self, found)) for path, found in by_path(self.routes).items()],
            redirect_slashes=False,
            default=_Address(self, ()),
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "lifespan":
            await self._router(scope, receive, send)
        else:
            # What an application that mounts this keeps in its state is not ours to change.
            own = {**scope, **located(scope), "app": self, "state": {}, "path_params": {}}
            await self._router(own, receive, security.securing(send))

    async def __aenter__(self) -> Web:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of what requests opened: for applications that mount it, whose lifespan is their own."""
        self.end_streams()
        await self.service.close()
        # A later request opens the service again, and gets a round of its own.
        self.live = Live()

    def end_streams(self) -> None:
        """End what would keep a server from shutting down."""
        self.live.close()

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        yield
        await self.close()

    async def respond(self, request: Request, routes: Sequence[Route]) -> Response | None:
        """Answer a request by the routes of its path; None: its client has left."""
        try:
            return await self._answer(request, routes)
        except ClientDisconnect:
            return None
        except Exception as error:
            problem = translate(error)
        if not self._has_pages or not wants_html(request):
            return problem.response()
        response = error_page(request, problem.status, problem.title, problem.detail)
        response.headers.update(problem.headers)
        return response

    async def _answer(self, request: Request, routes: Sequence[Route]) -> Response:
        _decode_path(request.scope)
        route = _chosen(request, routes)
        if not self.users:
            security.check_local(request)
        elif route is None or route.kind != "open":
            # What watches over a process asks for it by its address.
            security.check_host(request, self.settings.hosts)
        if route is None:
            return _without_route(request, routes)
        security.check_origin(request)
        user = request.state.user = await self._user(request, route)
        request.state.csrf = self.csrf.shown(request, "" if user is None else user.session)
        if route.role is not None:
            if user is None:
                if self._has_pages and wants_html(request) and request.method in security.SAFE:
                    return login.to_login(request)
                raise auth.unauthorized("Log in, or send a token: authorization: Bearer TOKEN.")
            if not user.may(route.role):
                raise Problem(403, f"This takes the role {route.role}; {user.name} is a {user.role}.")
            request.state.admin = await self.service.admin(user.name)
        await self._read(request, route, user)
        async with asyncio.timeout(PATIENCE):
            answered = await route.endpoint(request)
        return answered if isinstance(answered, Response) else answer(answered)

    async def _user(self, request: Request, route: Route) -> auth.User | None:
        if self.users and not self._recalled and auth.COOKIE in request.cookies and route.role is not None:
            await login.recall(self)
            self._recalled = True
        try:
            return auth.authenticate(request, self.users, self.sessions)
        except Problem:
            if route.role is None:
                return None
            # A right token passes at any time: others behind the same address may show wrong ones.
            client = security.client_address(request)
            self.bearers.check(client)
            await login.refused(request, client, self.bearers)
            raise

    async def _read(self, request: Request, route: Route, user: auth.User | None) -> None:
        """What the request says, as the route takes it; a change must carry a token where a browser asks."""
        if route.kind == "api":
            request.state.query = read.query(request, route.query)
        if route.method == "GET":
            return
        session = "" if user is None else user.session
        given = request.headers.get(security.HEADER, "")
        if route.kind == "page":
            request.state.form = await read.form(request)
            given = given or request.state.form.get(security.FIELD, "")
        if route.kind == "page" or (user is not None and user.by == "session"):
            self.csrf.check(request, session, given)
        if route.kind == "api":
            request.state.body = await read.body(request, route.body)


def wants_html(request: Request) -> bool:
    """Whether a browser asks, to show the answer to somebody."""
    return "text/html" in request.headers.get("accept", "").lower()


@dataclass(frozen=True, slots=True)
class _Address:
    """What is served at one path: an ASGI application, so that Starlette leaves every method to it."""

    web: Web
    routes: Sequence[Route]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self.web.respond(request, self.routes)
        if response is None:
            return
        if request.method != "HEAD":
            await response(scope, receive, send)
            return
        # Not by way of the response: one that streams would never end.
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await send({"type": "http.response.body", "body": b""})


def by_path(routes: Iterable[Route]) -> dict[str, list[Route]]:
    """Group routes by their paths; those of the API answer without ``/api`` as well."""
    found: dict[str, list[Route]] = {}
    for route in routes:
        found.setdefault(route.path, []).append(route)
        if route.kind == "api":
            found.setdefault(route.path.removeprefix("/api"), []).append(route)
    return found


def located(scope: Scope) -> Scope:
    """Return the prefix that all of this is mounted under, and the path as the router compares it.

    A slash in a name is ``%2F`` in the address, which the decoded path does not tell from any other slash:
    the router gets the raw path, each part of it encoded in one way.
    """
    root = str(scope.get("root_path", "")).rstrip("/")
    path = str(scope["path"])
    raw = (scope.get("raw_path") or quote(path, errors="surrogateescape").encode()).partition(b"?")[0]
    # The first part is what stands before the first slash: nothing.
    parts = raw.split(b"/")[1:]
    if path == root or path.startswith(f"{root}/"):
        parts = parts[root.count("/") :]
    if parts and parts[-1] == b"":
        parts.pop()
    own = "/".join(quote(unquote_to_bytes(part), safe="") for part in parts)
    return {"root_path": root, "raw_path": raw, "path": f"{root}/{own}"}


def _decode_path(scope: Scope) -> None:
    """Decode what the path holds; raise where it is not in UTF-8."""
    try:
        unquote(scope["path"].removeprefix(scope["root_path"]), errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "The path is not in UTF-8.") from None
    scope["path_params"] = {name: unquote(value) for name, value in scope["path_params"].items()}


def _chosen(request: Request, routes: Iterable[Route]) -> Route | None:
    """Return the route of the method; where there are two, the page for a browser, else the document."""
    method = "GET" if request.method == "HEAD" else request.method
    found = [route for route in routes if route.method == method]
    fitting = [route for route in found if (route.kind == "page") == wants_html(request)]
    return next(iter(fitting or found), None)


def _without_route(request: Request, routes: Iterable[Route]) -> Response:
    """Tell which methods an address takes; raise unless that was the question."""
    methods = {route.method for route in routes}
    if not methods:
        raise Problem(404, "There is nothing at this address.")
    allow = ", ".join(sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())}))
    if request.method != "OPTIONS":
        raise Problem(405, f"This address takes {allow}.", {"allow": allow})
    return Response(status_code=204, headers={"allow": allow})
