"""``/api/stats``, ``/api/series``, ``/api/relays``; for monitors, ``/livez``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from relaybox.errors import StoreError
from relaybox.operate.health import Health, Problem
from relaybox.web import documents, render, schemas

PATIENCE = 5.0
FRESH = 1.0
"""Seconds for which an answer is good; whoever asks more often costs the database nothing."""


async def stats(request: Request) -> documents.StatsDocument:
    """Where everything is: counts, destinations and relays."""
    admin = request.state.admin
    return render.stats(await admin.stats(), await admin.destinations(), request.app.rules)


async def series(request: Request) -> documents.SeriesDocument:
    """What charts are drawn from, of the last hours."""
    query: schemas.SeriesQuery = request.state.query
    found = await request.state.admin.series(query.hours, query.destination)
    points = [render.made(documents.PointDocument, point) for point in found.points]
    return documents.SeriesDocument(step_seconds=found.step.total_seconds(), points=points)


async def relays(request: Request) -> documents.RelaysDocument:
    """The relays that were seen last."""
    found = await request.state.admin.stats()
    return documents.RelaysDocument(relays=[render.relay(one) for one in found.relays])


async def livez(request: Request) -> documents.AliveDocument:
    """Whether this process answers."""
    return documents.AliveDocument(alive=True)


async def readyz(request: Request) -> Response:
    """Whether work flows: 503 and the reasons where it does not."""
    health = await _health(request)
    problems = [
        render.made(documents.TroubleDocument, one, reason=_reason(request, one.reason))
        for one in health.problems
    ]
    document = documents.HealthDocument(ready=health.ready, problems=problems)
    return render.answer(document, 200 if health.ready else 503)


def _reason(request: Request, reason: str) -> str:
    """All of it for those who may see more; behind the colon stand addresses and what others said."""
    shown: str = request.app.rules.scrub(reason)
    return shown if request.state.user is not None else shown.partition(":")[0]


async def _health(request: Request) -> Health:
    """What was found a moment ago, else what is found now; nobody looks twice at a time."""
    state = request.app.state
    async with request.app.service.alone():
        looked, health = getattr(state, "health", (-FRESH, None))
        if health is None or time.monotonic() - looked > FRESH:
            health = await _look(request)
            state.health = (time.monotonic(), health)
    return health


async def _look(request: Request) -> Health:
    try:
        async with asyncio.timeout(PATIENCE):
            admin = await request.app.service.admin("health")
            return await admin.health()  # type: ignore[no-any-return]
    except (StoreError, TimeoutError) as error:
        reason = f"the database does not answer: {' '.join(str(error).split())}"
        return Health(False, (Problem(None, reason, None),))


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    from relaybox.operate.metrics import exposition

    namespace = request.app.outbox.settings.namespace
    body, media_type = await exposition(request.state.admin, namespace)
    return Response(body, headers={"content-type": media_type})
