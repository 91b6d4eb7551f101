"""``/api/events`` and what is below it, ``/api/failures``, ``/api/dead-letters``."""

from __future__ import annotations

from uuid import UUID

import msgspec
from starlette.requests import Request

from relaybox.web import documents, read, render, schemas
from relaybox.web.problems import not_found


async def events(request: Request) -> documents.EventsDocument:
    """Deliveries that a filter is true of, newest first."""
    query: schemas.EventsQuery = request.state.query
    cursors, about = request.app.cursors, f"events {_asked(query)}"
    place = cursors.open(about, query.cursor, UUID)
    found = await request.state.admin.events(read.filter_of(query), limit=query.limit, cursor=place)
    return documents.EventsDocument(
        events=[render.event(entry, request.app.rules) for entry in found.entries],
        cursor=cursors.seal(about, found.cursor),
    )


def _asked(query: schemas.EventsQuery) -> str:
    """The question, however long the pages of its answer are."""
    return msgspec.json.encode(msgspec.structs.replace(query, limit=1, cursor=None)).decode()


async def event(request: Request) -> documents.DeliveriesDocument:
    """A delivery, or every delivery of an event, with payload, headers and failed attempts."""
    id_ = read.identifier(request.path_params["id"])
    found = await request.state.admin.event(id_)
    if not found:
        raise not_found(f"No event and no delivery has the id {id_}.")
    rules = request.app.rules
    return documents.DeliveriesDocument(deliveries=[render.detail(one, rules) for one in found])


async def why(request: Request) -> documents.ReasonsDocument:
    """Why each delivery of an id is where it is."""
    id_ = read.identifier(request.path_params["id"])
    found = await request.state.admin.why(id_)
    if not found:
        raise not_found(f"No event and no delivery has the id {id_}.")
    return documents.ReasonsDocument(deliveries=[render.reason(one, request.app.rules) for one in found])


async def failures(request: Request) -> documents.FailuresDocument:
    """What failed for good, in groups of the same destination and the same error."""
    query: schemas.FailuresQuery = request.state.query
    found = await request.state.admin.failures(query.destination, limit=query.limit)
    groups = [
        render.made(
            documents.FailureDocument,
            group,
            event_types=list(group.event_types),
            message=request.app.rules.scrub(group.message),
        )
        for group in found.groups
    ]
    return documents.FailuresDocument(failures=groups, looked_at=found.looked_at, capped=found.capped)


async def dead_letters(request: Request) -> documents.DeadLettersDocument:
    """What was given to dead-letter destinations, and why, newest first."""
    query: schemas.PageQuery = request.state.query
    cursors = request.app.cursors
    place = cursors.open("dead letters", query.cursor, UUID)
    found = await request.state.admin.dead_letters(query.limit, place)
    rows = [render.dead_letter(row, request.app.rules) for row in found.rows]
    return documents.DeadLettersDocument(dead_letters=rows, cursor=cursors.seal("dead letters", found.cursor))
