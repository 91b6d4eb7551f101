"""``/api/stats``, ``/api/series``, ``/api/relays``."""

from __future__ import annotations

from starlette.requests import Request

from relaybox.web import documents, render, schemas


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
