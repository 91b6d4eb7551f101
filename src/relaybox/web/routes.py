"""Everything that is served, in one table; what a caller must be for it is read from here, and only here."""

from __future__ import annotations

from typing import Any

import msgspec

from relaybox.web import documents, health, login, pages, schemas
from relaybox.web.endpoints import actions, destinations, events, operations, stats
from relaybox.web.openapi import openapi
from relaybox.web.route import Endpoint, Route
from relaybox.web.schemas import Nothing


def _get(path: str, endpoint: Endpoint, answer: Any, query: type[msgspec.Struct] = Nothing) -> Route:
    return Route("GET", f"/api{path}", endpoint, "viewer", "api", query=query, answer=answer)


def _post(path: str, endpoint: Endpoint, answer: Any, body: type[msgspec.Struct] = Nothing) -> Route:
    return Route("POST", f"/api{path}", endpoint, "operator", "api", body=body, answer=answer)


API = (
    _get("/stats", stats.stats, documents.StatsDocument),
    _get("/series", stats.series, documents.SeriesDocument, schemas.SeriesQuery),
    _get("/relays", stats.relays, documents.RelaysDocument),
    _get("/events", events.events, documents.EventsDocument, schemas.EventsQuery),
    _get("/events/{id}", events.event, documents.DeliveriesDocument),
    _get("/events/{id}/why", events.why, documents.ReasonsDocument),
    _get("/failures", events.failures, documents.FailuresDocument, schemas.FailuresQuery),
    _get("/dead-letters", events.dead_letters, documents.DeadLettersDocument, schemas.PageQuery),
    _post("/retry", actions.retry, documents.RetriedDocument, schemas.ActionBody),
    _post("/replay", actions.replay, documents.ReplayedDocument, schemas.ReplayBody),
    _post("/discard", actions.discard, documents.DiscardedDocument, schemas.ActionBody),
    _post("/move", actions.move, documents.MovedDocument, schemas.MoveBody),
    _get("/operations", operations.operations, documents.OperationsDocument, schemas.LimitQuery),
    _get("/operations/{id}", operations.operation, documents.OperationDocument),
    _post("/operations/{id}/cancel", operations.cancel, documents.CancelledDocument),
    _get("/destinations", destinations.destinations, documents.DestinationsDocument),
    _get("/destinations/{name}", destinations.destination, documents.DestinationDocument),
    _post("/destinations/{name}/pause", destinations.pause, documents.PausedDocument, schemas.PauseBody),
    _post("/destinations/{name}/resume", destinations.resume, documents.ResumedDocument),
    _post("/destinations/{name}/test", destinations.test, documents.TestedDocument),
    _get("/audit", operations.audit, documents.AuditsDocument, schemas.PageQuery),
    _get("/openapi.json", openapi, Any),
)
"""Documents, for programs."""

WATCHED = (
    Route("GET", "/livez", health.livez, None, "open", answer=documents.AliveDocument),
    Route("GET", "/readyz", health.readyz, None, "open", answer=documents.HealthDocument),
    Route("GET", "/metrics", health.metrics, "viewer", "open", media_type="text/plain"),
)
"""For what watches over the process."""

PAGES = (
    Route("POST", "/login", login.enter, None, "page"),
    Route("POST", "/logout", login.leave, "viewer", "page"),
    *pages.PAGES,
)
"""For people."""

ROUTES: tuple[Route, ...] = (*API, *WATCHED, *PAGES)
