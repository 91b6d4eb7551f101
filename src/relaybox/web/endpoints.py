"""What the API answers, in the order of the route table.

The actions do at once what ids name, and what few rows a filter is true of. More than ``ledger.CAP`` rows
take longer than anybody waits for an answer: they are done in the background, as with ``background``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import TypeAlias
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relaybox.errors import did_you_mean
from relaybox.operate.admin_actions import Action, Done, Named
from relaybox.operate.health import Health
from relaybox.stores.ledger import EVERYTHING, Filter
from relaybox.web import documents, read, render, schemas
from relaybox.web.problems import Problem, invalid
from relaybox.web.security import prefix
from relaybox.web.signed import number

Answer: TypeAlias = documents.DoneDocument | Response
"""What was done, or the operation that does it."""

KINDS: Mapping[Action, tuple[type[documents.DoneDocument], str]] = {
    "retry": (documents.RetriedDocument, "retried"),
    "replay": (documents.ReplayedDocument, "replayed"),
    "discard": (documents.DiscardedDocument, "discarded"),
    "move": (documents.MovedDocument, "moved"),
}
"""The answer of each action, and its field that counts what was done."""


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
        raise Problem(404, f"No event and no delivery has the id {id_}.")
    rules = request.app.rules
    return documents.DeliveriesDocument(deliveries=[render.detail(one, rules) for one in found])


async def why(request: Request) -> documents.ReasonsDocument:
    """Why each delivery of an id is where it is."""
    id_ = read.identifier(request.path_params["id"])
    found = await request.state.admin.why(id_)
    if not found:
        raise Problem(404, f"No event and no delivery has the id {id_}.")
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


async def retry(request: Request) -> Answer:
    """Start failed deliveries anew, with all their attempts; without a body, all of them."""
    return await _act(request, "retry")


async def replay(request: Request) -> Answer:
    """Send final deliveries once more, as new rows of the same events."""
    return await _act(request, "replay", to=request.state.body.to)


async def discard(request: Request) -> Answer:
    """Give up failed or pending deliveries; the next one of each key becomes due."""
    return await _act(request, "discard")


async def move(request: Request) -> Answer:
    """Give a destination's pending and failed deliveries to another."""
    body: schemas.MoveBody = request.state.body

    async def act(_: Filter, to: str) -> Done:
        return await request.state.admin.move(body.from_, to)  # type: ignore[no-any-return]

    return await _act_on_all(request, "move", Filter(destination=body.from_), act, to=body.to)


async def _act(request: Request, action: Action, **options: str | None) -> Answer:
    body: schemas.ActionBody = request.state.body
    what = _what(body, everything=action == "retry")
    act = getattr(request.state.admin, action)
    if isinstance(what, Filter):
        return await _act_on_all(request, action, what, act, **options)
    return _told(action, await act(what, dry_run=body.dry_run, **options), body.dry_run)


async def _act_on_all(
    request: Request, action: Action, what: Filter, act: Callable[..., Awaitable[Done]], **options: str | None
) -> Answer:
    body = request.state.body
    counted = await request.state.admin.count(action, what, **options)
    if body.dry_run:
        return _told(action, Done(counted.count), True, counted.capped)
    if body.background or counted.capped or body.rate is not None:
        return await _started(request, action, what, rate=body.rate, **options)
    return _told(action, await act(what, **options), False)


def _what(body: schemas.ActionBody, *, everything: bool) -> Filter | Named:
    filter = EVERYTHING if body.filter is None else read.filter_of(body.filter)
    if body.ids is not None:
        if body.all or filter != Filter(destination=filter.destination):
            raise invalid("ids", "of a filter, only its destination goes together with ids")
        if body.background or body.rate is not None:
            raise invalid("ids", "what ids name is done at once; leave out background and rate")
        return Named(body.ids, filter.destination)
    if body.all and filter != EVERYTHING:
        raise invalid("all", "say all or a filter, not both")
    if not everything and not body.all and filter == EVERYTHING:
        raise Problem(422, 'Say which: "ids", a "filter" such as {"destination": "NAME"}, or "all": true.')
    return filter


def _told(action: Action, done: Done, dry_run: bool, capped: bool = False) -> documents.DoneDocument:
    kind, verb = KINDS[action]
    return kind(
        **{verb: done.affected},
        skipped=done.skipped,
        unknown=list(done.unknown),
        dry_run=dry_run,
        capped=capped,
    )


async def _started(
    request: Request, action: Action, filter: Filter, *, rate: float | None, to: str | None = None
) -> Response:
    """Start a bulk action; the answer says where to look how far it is."""
    bulk = request.app.service.bulk()
    begun = await bulk.start(request.state.user.name, action, filter, to=to, rate=rate)
    location = f"{prefix(request)}/api/operations/{begun.id}"
    return render.answer(render.operation(begun, request.app.rules), 202, {"location": location})


async def operations(request: Request) -> documents.OperationsDocument:
    """Bulk actions in the background, newest first."""
    query: schemas.LimitQuery = request.state.query
    found = await request.state.admin.operations(query.limit)
    return documents.OperationsDocument(
        operations=[render.operation(one, request.app.rules) for one in found]
    )


async def operation(request: Request) -> documents.OperationDocument:
    """A bulk action: how far it is."""
    id_ = read.identifier(request.path_params["id"])
    found = await request.state.admin.operation(id_)
    if found is None:
        raise Problem(404, f"No operation has the id {id_}.")
    return render.operation(found, request.app.rules)


async def cancel(request: Request) -> documents.CancelledDocument:
    """Stop a bulk action; what it has done stays done."""
    id_ = read.identifier(request.path_params["id"])
    if await request.state.admin.operation(id_) is None:
        raise Problem(404, f"No operation has the id {id_}.")
    return documents.CancelledDocument(cancelled=await request.state.admin.cancel(id_))


async def destinations(request: Request) -> documents.DestinationsDocument:
    """Every destination that is configured, or has rows."""
    admin = request.state.admin
    configured = await admin.destinations()
    found = (await admin.stats()).destinations
    return documents.DestinationsDocument(
        destinations=[render.destination(one, configured.get(one.name), request.app.rules) for one in found]
    )


async def destination(request: Request) -> documents.DestinationDocument:
    """One destination: its deliveries, and what holds it up."""
    admin, name = request.state.admin, await _known(request)
    [found] = [one for one in (await admin.stats()).destinations if one.name == name]
    return render.destination(found, (await admin.destinations()).get(name), request.app.rules)


async def pause(request: Request) -> documents.PausedDocument:
    """Let nothing more be sent there, until a time or until it is resumed."""
    body: schemas.PauseBody = request.state.body
    name, until = await _known(request), read.moment(body.until, "until", 1)
    if until is not None and until <= datetime.now(UTC):
        raise invalid("until", "this time is over; write one to come, or a duration such as 30m")
    await request.state.admin.pause(name, body.reason, until)
    return documents.PausedDocument(destination=name, paused=True, reason=body.reason, until=until)


async def resume(request: Request) -> documents.ResumedDocument:
    """End a pause, and close an open circuit."""
    name = await _known(request)
    return documents.ResumedDocument(destination=name, resumed=await request.state.admin.resume(name))


async def test(request: Request) -> documents.TestedDocument:
    """Write an event that shows whether deliveries arrive there."""
    name = await _known(request)
    return documents.TestedDocument(destination=name, event_id=await request.state.admin.test(name))


async def _known(request: Request) -> str:
    name = str(request.path_params["name"])
    names = await request.state.admin.names() if "\0" not in name else ()
    if name not in names:
        raise Problem(404, f"No destination is called {name!r}{did_you_mean(name, names)}")
    return name


async def audit(request: Request) -> documents.AuditsDocument:
    """What operators did, newest first."""
    query: schemas.PageQuery = request.state.query
    cursors = request.app.cursors
    place = cursors.open("audit", query.cursor, number)
    found = await request.state.admin.audits(query.limit, place)
    rows = [
        render.made(documents.AuditDocument, row, details=render.details(row.details, request.app.rules))
        for row in found.rows
    ]
    return documents.AuditsDocument(audit=rows, cursor=cursors.seal("audit", found.cursor))


async def livez(request: Request) -> documents.AliveDocument:
    """Whether this process answers."""
    return documents.AliveDocument(alive=True)


async def readyz(request: Request) -> Response:
    """Whether work flows: 503 and the reasons where it does not."""
    health: Health = await request.app.service.health()
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


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    from relaybox.operate.metrics import exposition

    namespace = request.app.outbox.settings.namespace
    body, media_type = await exposition(request.state.admin, namespace)
    return Response(body, headers={"content-type": media_type})
