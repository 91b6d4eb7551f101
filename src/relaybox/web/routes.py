"""The table of routes, and the only place that says which role each requires."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.requests import Request

from relaybox.web import endpoints, login, schemas
from relaybox.web.live import live
from relaybox.web.openapi import openapi
from relaybox.web.pages import actions, destinations, events, system
from relaybox.web.schemas import Nothing
from relaybox.web.settings import Role
from relaybox.web.templating import static

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    ``role`` None allows anybody. An ``api`` route gets ``request.state.query`` and ``request.state.body``, of
    the types ``query`` and ``body``, and returns a document. A ``page`` that takes POST gets
    ``request.state.form``, with its CSRF token checked. An ``open`` route answers to any host name.
    """

    path: str
    endpoint: Endpoint
    role: Role | None = "viewer"
    kind: Literal["api", "page", "open"] = "page"
    method: Literal["GET", "POST"] = "GET"
    query: type[msgspec.Struct] = Nothing
    body: type[msgspec.Struct] = Nothing
    media_type: str = "application/json"

    @property
    def answer(self) -> type[msgspec.Struct] | None:
        """Return the type of the response, for OpenAPI."""
        return endpoints.ANSWERS.get(self.endpoint)

    @property
    def summary(self) -> str:
        """Return the first line of the endpoint's docstring, for OpenAPI."""
        return (self.endpoint.__doc__ or "").strip().partition("\n")[0]


def _get(path: str, endpoint: Endpoint, query: type[msgspec.Struct] = Nothing) -> Route:
    return Route(f"/api{path}", endpoint, "viewer", "api", query=query)


def _post(path: str, endpoint: Endpoint, body: type[msgspec.Struct] = Nothing) -> Route:
    return Route(f"/api{path}", endpoint, "operator", "api", "POST", body=body)


API = (
    _get("/stats", endpoints.stats),
    _get("/series", endpoints.series, schemas.SeriesQuery),
    _get("/relays", endpoints.relays),
    _get("/events", endpoints.events, schemas.EventsQuery),
    _get("/events/{id}", endpoints.event),
    _get("/events/{id}/why", endpoints.why),
    _get("/failures", endpoints.failures, schemas.FailuresQuery),
    _get("/dead-letters", endpoints.dead_letters, schemas.PageQuery),
    _post("/retry", endpoints.retry, schemas.ActionBody),
    _post("/replay", endpoints.replay, schemas.ReplayBody),
    _post("/discard", endpoints.discard, schemas.ActionBody),
    _post("/move", endpoints.move, schemas.MoveBody),
    _get("/operations", endpoints.operations, schemas.LimitQuery),
    _get("/operations/{id}", endpoints.operation),
    _post("/operations/{id}/cancel", endpoints.cancel),
    _get("/destinations", endpoints.destinations),
    _get("/destinations/{name}", endpoints.destination),
    _post("/destinations/{name}/pause", endpoints.pause, schemas.PauseBody),
    _post("/destinations/{name}/resume", endpoints.resume),
    _post("/destinations/{name}/test", endpoints.test),
    _get("/audit", endpoints.audit, schemas.PageQuery),
    _get("/openapi.json", openapi),
)

WATCHED = (
    Route("/livez", endpoints.livez, None, "open"),
    Route("/readyz", endpoints.readyz, None, "open"),
    Route("/metrics", endpoints.metrics, "viewer", "open", media_type="text/plain"),
)

PAGES = (
    Route("/login", login.enter, None, method="POST"),
    Route("/logout", login.leave, method="POST"),
    Route("/", destinations.overview),
    Route("/destinations", destinations.destinations),
    Route("/destinations/{name}", destinations.destination),
    Route("/events", events.events),
    Route("/events/{id}", events.event),
    Route("/failures", events.failures),
    Route("/dead-letters", events.dead_letters),
    Route("/operations", system.operations),
    Route("/relays", system.relays),
    Route("/audit", system.audit),
    Route("/system", system.system),
    Route("/actions/confirm", actions.confirm, "operator"),
    *(Route(f"/actions/{name}", act, "operator", method="POST") for name, act in actions.ACTIONS.items()),
    Route("/live", live),
    Route("/login", login.login, None),
    Route("/static/{file}", static, None),
)

ROUTES: tuple[Route, ...] = (*API, *WATCHED, *PAGES)
