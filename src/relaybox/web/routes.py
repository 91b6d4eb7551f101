"""The table of routes, and the only place that says which role each requires."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.requests import Request

from relaybox.web import endpoints, login, pages, schemas
from relaybox.web.live import live
from relaybox.web.openapi import openapi
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

    method: Literal["GET", "POST"]
    path: str
    endpoint: Endpoint
    role: Role | None
    kind: Literal["api", "page", "open"]
    query: type[msgspec.Struct] = Nothing
    body: type[msgspec.Struct] = Nothing
    answer: Any = None
    media_type: str = "application/json"

    @property
    def summary(self) -> str:
        """Return the first line of the endpoint's docstring, for OpenAPI."""
        return (self.endpoint.__doc__ or "").strip().partition("\n")[0]


def _get(path: str, endpoint: Endpoint, answer: Any, query: type[msgspec.Struct] = Nothing) -> Route:
    return Route("GET", f"/api{path}", endpoint, "viewer", "api", query=query, answer=answer)


def _post(path: str, endpoint: Endpoint, answer: Any, body: type[msgspec.Struct] = Nothing) -> Route:
    return Route("POST", f"/api{path}", endpoint, "operator", "api", body=body, answer=answer)


def _page(path: str, endpoint: Endpoint) -> Route:
    return Route("GET", path, endpoint, "viewer", "page")


API = (
    _get("/stats", endpoints.stats, schemas.StatsDocument),
    _get("/series", endpoints.series, schemas.SeriesDocument, schemas.SeriesQuery),
    _get("/relays", endpoints.relays, schemas.RelaysDocument),
    _get("/events", endpoints.events, schemas.EventsDocument, schemas.EventsQuery),
    _get("/events/{id}", endpoints.event, schemas.DeliveriesDocument),
    _get("/events/{id}/why", endpoints.why, schemas.ReasonsDocument),
    _get("/failures", endpoints.failures, schemas.FailuresDocument, schemas.FailuresQuery),
    _get("/dead-letters", endpoints.dead_letters, schemas.DeadLettersDocument, schemas.PageQuery),
    _post("/retry", endpoints.retry, schemas.DONE["retry"], schemas.ActionBody),
    _post("/replay", endpoints.replay, schemas.DONE["replay"], schemas.ReplayBody),
    _post("/discard", endpoints.discard, schemas.DONE["discard"], schemas.ActionBody),
    _post("/move", endpoints.move, schemas.DONE["move"], schemas.MoveBody),
    _get("/operations", endpoints.operations, schemas.OperationsDocument, schemas.LimitQuery),
    _get("/operations/{id}", endpoints.operation, schemas.OperationDocument),
    _post("/operations/{id}/cancel", endpoints.cancel, schemas.CancelledDocument),
    _get("/destinations", endpoints.destinations, schemas.DestinationsDocument),
    _get("/destinations/{name}", endpoints.destination, schemas.DestinationDocument),
    _post("/destinations/{name}/pause", endpoints.pause, schemas.PausedDocument, schemas.PauseBody),
    _post("/destinations/{name}/resume", endpoints.resume, schemas.ResumedDocument),
    _post("/destinations/{name}/test", endpoints.test, schemas.TestedDocument),
    _get("/audit", endpoints.audit, schemas.AuditsDocument, schemas.PageQuery),
    _get("/openapi.json", openapi, Any),
)

WATCHED = (
    Route("GET", "/livez", endpoints.livez, None, "open", answer=schemas.AliveDocument),
    Route("GET", "/readyz", endpoints.readyz, None, "open", answer=schemas.HealthDocument),
    Route("GET", "/metrics", endpoints.metrics, "viewer", "open", media_type="text/plain"),
)

PAGES = (
    Route("POST", "/login", login.enter, None, "page"),
    Route("POST", "/logout", login.leave, "viewer", "page"),
    _page("/", pages.destinations.overview),
    _page("/destinations", pages.destinations.destinations),
    _page("/destinations/{name}", pages.destinations.destination),
    _page("/events", pages.events.events),
    _page("/events/{id}", pages.events.event),
    _page("/failures", pages.events.failures),
    _page("/dead-letters", pages.events.dead_letters),
    _page("/operations", pages.system.operations),
    _page("/relays", pages.system.relays),
    _page("/audit", pages.system.audit),
    _page("/system", pages.system.system),
    Route("GET", "/actions/confirm", pages.actions.confirm, "operator", "page"),
    *(
        Route("POST", f"/actions/{name}", act, "operator", "page")
        for name, act in pages.actions.ACTIONS.items()
    ),
    _page("/live", live),
    Route("GET", "/login", login.login, None, "page"),
    Route("GET", "/static/{file}", static, None, "page"),
)

ROUTES: tuple[Route, ...] = (*API, *WATCHED, *PAGES)
