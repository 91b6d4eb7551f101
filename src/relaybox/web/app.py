"""The ASGI application of the API and the dashboard.

Every request takes these steps, in this order:

    route → host → origin → authentication → role → parameters and body → endpoint → response
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

from starlette import routing
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaybox.core.redact import Rules
from relaybox.outbox import Outbox
from relaybox.web import auth, login, read, security
from relaybox.web.endpoints import answer
from relaybox.web.live import Live
from relaybox.web.problems import Problem, translate
from relaybox.web.routes import Route
from relaybox.web.service import Service
from relaybox.web.settings import WebSettings, local_user
from relaybox.web.templating import error_page

PATIENCE = 30.0
"""Seconds for an endpoint to answer."""


class Web:
    """The application for one outbox; ``relaybox.web.dashboard`` and ``api`` create it."""

    def __init__(self, outbox: Outbox, settings: WebSettings, routes: Iterable[Route]) -> None:
        known, secret = settings.reveal() or (local_user(),), settings.revealed_secret()
        tokens = [token for user in known for token in user.tokens]

        self.outbox = outbox
        self.settings = settings
        self.routes = tuple(routes)
        self.service = Service(outbox)
        link = None if settings.users else login.Link()
        self.gate = login.Gate(known, secret, self.service, link)
        self.csrf = security.Csrf(auth.derived(secret, "csrf", *tokens))
        self.cursors = auth.Cursors(auth.derived(secret, "cursor", *tokens))
        self.rules = Rules.of(settings.redact)
        self.live = Live()
        self._has_pages = any(route.kind == "page" for route in self.routes)
        self._router = routing.Router(
            [routing.Route(path, _Address(self, found)) for path, found in by_path(self.routes).items()],
            redirect_slashes=False,
            default=_Address(self, ()),
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "lifespan":
            await self._router(scope, receive, send)
        else:
            # A state of its own: do not change that of the application that mounts this.
            own = {**scope, **located(scope), "app": self, "state": {}, "path_params": {}}
            await self._router(own, receive, security.securing(send, own.get("scheme", "http")))

    async def __aenter__(self) -> Web:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what requests opened; call it if this is mounted, where its own lifespan does not run."""
        self.end_streams()
        await self.service.close()
        # A later request may open the service again: it needs a Live that is not closed.
        self.live = Live()

    def end_streams(self) -> None:
        """End open streams, which would keep a server from shutting down."""
        self.live.close()

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        yield
        await self.close()

    async def respond(self, request: Request, routes: Sequence[Route]) -> Response | None:
        """Answer a request with one of the routes of its path; return None if its client has left."""
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
        if route is None or route.kind != "open":
            # Probes and scrapers use the address of the process, not its name.
            security.check_host(request, self.settings.hosts)
        if route is None:
            return _without_route(request, routes)
        security.check_origin(request)
        user = await self.gate.user(request, required=route.role is not None)
        request.state.user = user
        request.state.csrf = self.csrf.shown(request, "" if user is None else user.session)
        if route.role is not None:
            if user is None:
                if self._has_pages and wants_html(request) and request.method in security.SAFE:
                    return login.to_login(request)
                raise auth.unauthorized(self.gate.how)
            if not user.may(route.role):
                raise Problem(403, f"This takes the role {route.role}; {user.name} is a {user.role}.")
            request.state.admin = await self.service.admin(user.name)
        await self._read(request, route, user)
        async with asyncio.timeout(PATIENCE):
            answered = await route.endpoint(request)
        return answered if isinstance(answered, Response) else answer(answered)

    async def _read(self, request: Request, route: Route, user: auth.User | None) -> None:
        """Read query, body or form into ``request.state``; check the CSRF token of browsers."""
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
    """True if a browser asks for a page."""
    return "text/html" in request.headers.get("accept", "").lower()


class _Address:
    """The routes of one path: an ASGI application, so that Starlette passes it every method."""

    def __init__(self, web: Web, routes: Sequence[Route]) -> None:
        self._web = web
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self._web.respond(request, self._routes)
        if response is None:
            return
        if request.method != "HEAD":
            await response(scope, receive, send)
            return
        # Do not run the response: a stream would never end.
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await send({"type": "http.response.body", "body": b""})


def by_path(routes: Iterable[Route]) -> dict[str, list[Route]]:
    """Group routes by path; routes of the API are also at their path without ``/api``."""
    found: dict[str, list[Route]] = {}
    for route in routes:
        found.setdefault(route.path, []).append(route)
        if route.kind == "api":
            found.setdefault(route.path.removeprefix("/api"), []).append(route)
    return found


def located(scope: Scope) -> Scope:
    """Return the mount prefix, and the path for the router: the raw path, each part encoded the same way.

    In the decoded path, an encoded slash in a name (``%2F``) would look like a separator.
    """
    root = str(scope.get("root_path", "")).rstrip("/")
    path = str(scope["path"])
    raw = (scope.get("raw_path") or quote(path, errors="surrogateescape").encode()).partition(b"?")[0]
    # The first part, before the leading slash, is empty.
    parts = raw.split(b"/")[1:]
    if path == root or path.startswith(f"{root}/"):
        parts = parts[root.count("/") :]
    if parts and parts[-1] == b"":
        parts.pop()
    own = "/".join(quote(unquote_to_bytes(part), safe="") for part in parts)
    return {"root_path": root, "raw_path": raw, "path": f"{root}/{own}"}


def _decode_path(scope: Scope) -> None:
    try:
        unquote(scope["path"].removeprefix(scope["root_path"]), errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "The path is not in UTF-8.") from None
    scope["path_params"] = {name: unquote(value) for name, value in scope["path_params"].items()}


def _chosen(request: Request, routes: Iterable[Route]) -> Route | None:
    """Return the route of the method; if there are two, the page for a browser, else the API's."""
    method = "GET" if request.method == "HEAD" else request.method
    found = [route for route in routes if route.method == method]
    fitting = [route for route in found if (route.kind == "page") == wants_html(request)]
    return next(iter(fitting or found), None)


def _without_route(request: Request, routes: Iterable[Route]) -> Response:
    """Answer ``OPTIONS`` with the allowed methods; raise 404 or 405 for anything else."""
    methods = {route.method for route in routes}
    if not methods:
        raise Problem(404, "There is nothing at this address.")
    allow = ", ".join(sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())}))
    if request.method != "OPTIONS":
        raise Problem(405, f"This address takes {allow}.", {"allow": allow})
    return Response(status_code=204, headers={"allow": allow})
