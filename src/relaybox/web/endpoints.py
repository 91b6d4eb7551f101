"""The endpoints of the API, in the order of the route table. Their docstrings are summaries in OpenAPI.

Actions on ids, and on filters that match few rows, are done at once. A filter that matches more than
``ledger.CAP`` rows is processed in the background, as with ``background`` or ``rate``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.redact import redacted, redacted_text
from relaybox.errors import did_you_mean
from relaybox.operate import documents
from relaybox.operate.action import Done, Named
from relaybox.operate.configured import Action
from relaybox.operate.health import Health
from relaybox.operate.health import Problem as FlowProblem
from relaybox.operate.history import FailureGroup, Point
from relaybox.stores.journal import AuditRow
from relaybox.stores.ledger import EVERYTHING, Filter
from relaybox.web import read, schemas
from relaybox.web.auth import number
from relaybox.web.problems import Problem, invalid
from relaybox.web.security import prefix

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]

ANSWERS: dict[Endpoint, type[Struct]] = {}
"""The types of responses, for OpenAPI."""


def answers(kind: str | type[Struct], **fields: Any) -> Callable[[Endpoint], Endpoint]:
    """Say what an endpoint answers with: a known document, or one of this name that has these fields."""

    def mark(endpoint: Endpoint) -> Endpoint:
        described = inspect.getdoc(endpoint) or ""
        ANSWERS[endpoint] = documents.document(kind, described, **fields) if isinstance(kind, str) else kind
        return endpoint

    return mark


@answers(documents.StatsDocument)
async def stats(request: Request) -> Any:
    """Where everything is: counts, destinations and relays."""
    admin = request.state.admin
    return _redacted(request, documents.stats(await admin.stats(), await admin.destinations()))


@answers("Series", step_seconds=float, points=[Point])
async def series(request: Request) -> Any:
    """Return the samples of the last hours, from which the charts are drawn."""
    query: schemas.SeriesQuery = request.state.query
    found = await request.state.admin.series(query.hours, query.destination)
    return {"step_seconds": found.step.total_seconds(), "points": found.points}


@answers("Relays", relays=[documents.RelayDocument])
async def relays(request: Request) -> Any:
    """The relays that were seen last."""
    return {"relays": documents.relays(await request.state.admin.stats())}


@answers("Events", events=[documents.EventDocument], cursor=str | None)
async def events(request: Request) -> Any:
    """Deliveries that a filter is true of, newest first.

    A short page that has a cursor is worth going on from.
    """
    query: schemas.EventsQuery = request.state.query
    # A cursor stays valid if the page size changes.
    asked = msgspec.json.encode(replace(query, limit=1, cursor=None)).decode()
    ask = partial(request.state.admin.events, read.filter_of(query, request.app.rules))
    return await _page(request, f"events {asked}", ask, UUID, documents.events)


async def _page(
    request: Request,
    about: str,
    ask: Callable[..., Awaitable[Any]],
    kind: Callable[[str], object],
    shown: Callable[[Any, str | None], Any],
) -> Any:
    query, cursors = request.state.query, request.app.cursors
    found = await ask(limit=query.limit, cursor=cursors.open(about, query.cursor, kind))
    return _redacted(request, shown(found, cursors.seal(about, found.cursor)))


@answers("Deliveries", deliveries=[documents.DetailDocument])
async def event(request: Request) -> Any:
    """Return a delivery, or every delivery of an event, with payload, headers and failed attempts."""
    found = await _found(request, request.state.admin.event)
    return _redacted(request, documents.deliveries(found, partial(redacted_text, rules=request.app.rules)))


@answers("Reasons", deliveries=[documents.ReasonDocument])
async def why(request: Request) -> Any:
    """Why each delivery of an id is where it is."""
    return _redacted(request, documents.reasons(await _found(request, request.state.admin.why)))


async def _found(
    request: Request, ask: Callable[[UUID], Awaitable[Any]], what: str = "event and no delivery"
) -> Any:
    id_ = read.identifier(request.path_params["id"])
    if found := await ask(id_):
        return found
    raise Problem(404, f"No {what} has the id {id_}.")


@answers("Failures", failures=[FailureGroup], looked_at=int, capped=bool)
async def failures(request: Request) -> Any:
    """Group what failed for good by the same destination and the same error.

    If ``capped``, only the newest ``looked_at`` failures are grouped.
    """
    query: schemas.FailuresQuery = request.state.query
    found = await request.state.admin.failures(query.destination, limit=query.limit)
    return _redacted(request, documents.failures(found))


@answers("DeadLetters", dead_letters=[documents.DeadLetterDocument], cursor=str | None)
async def dead_letters(request: Request) -> Any:
    """List what was given to dead-letter destinations, and why, newest first."""
    ask = request.state.admin.dead_letters
    return await _page(request, "dead letters", ask, UUID, documents.dead_letters)


@answers(documents.DONE["retry"])
async def retry(request: Request) -> Any:
    """Start failed deliveries again, with all their attempts; without a body, all of them."""
    return await _act(request, "retry")


@answers(documents.DONE["replay"])
async def replay(request: Request) -> Any:
    """Send final deliveries once more, as new rows of the same events."""
    return await _act(request, "replay", to=request.state.body.to)


@answers(documents.DONE["discard"])
async def discard(request: Request) -> Any:
    """Give up failed or pending deliveries; the next one of each key becomes due."""
    return await _act(request, "discard")


@answers(documents.DONE["move"])
async def move(request: Request) -> Any:
    """Give a destination's pending and failed deliveries to another."""
    body: schemas.MoveBody = request.state.body
    return await _act_on_all(request, "move", Filter(destination=body.from_), to=body.to)


async def _act(request: Request, action: Action, **options: str | None) -> Any:
    body: schemas.ActionBody = request.state.body
    filter = EVERYTHING if body.filter is None else read.filter_of(body.filter, request.app.rules)
    if body.ids is None:
        _check_filter(filter, all=body.all, optional=action == "retry")
        return await _act_on_all(request, action, filter, **options)
    if body.all or filter != Filter(destination=filter.destination):
        raise invalid("ids", "of a filter, only its destination goes together with ids")
    if body.background or body.rate is not None:
        raise invalid("ids", "what ids name is done at once; leave out background and rate")
    act, what = getattr(request.state.admin, action), Named(body.ids, filter.destination)
    return documents.done(action, await act(what, dry_run=body.dry_run, **options), dry_run=body.dry_run)


def _check_filter(filter: Filter, *, all: bool, optional: bool) -> None:
    if all and filter != EVERYTHING:
        raise invalid("all", "say all or a filter, not both")
    if not optional and not all and filter == EVERYTHING:
        problem = (
            'Say which deliveries: give "ids", a "filter" such as {"destination": "NAME"}, or "all": true.'
        )
        raise Problem(422, problem)


async def _act_on_all(request: Request, action: Action, what: Filter, **options: str | None) -> Any:
    admin, body = request.state.admin, request.state.body
    counted = await admin.count(action, what, **options)
    if body.dry_run:
        return documents.done(action, Done(counted.count), dry_run=True, capped=counted.capped)
    if body.background or counted.capped or body.rate is not None:
        bulk, actor = request.app.service.bulk(), request.state.user.name
        begun = await bulk.start(actor, action, what, rate=body.rate, **options)
        return answer(
            _redacted(request, documents.made(documents.OperationDocument, begun)),
            202,
            {"location": f"{prefix(request)}/api/operations/{begun.id}"},
        )
    done = await getattr(admin, action)(what.destination if action == "move" else what, **options)
    return documents.done(action, done, dry_run=False)


@answers("Operations", operations=[documents.OperationDocument])
async def operations(request: Request) -> Any:
    """Bulk actions in the background, newest first."""
    found = await request.state.admin.operations(request.state.query.limit)
    return _redacted(request, {"operations": documents.each(documents.OperationDocument, found)})


@answers(documents.OperationDocument)
async def operation(request: Request) -> Any:
    """Return a bulk action, and how far it is."""
    found = await _found(request, request.state.admin.operation, "operation")
    return _redacted(request, documents.made(documents.OperationDocument, found))


@answers("Cancelled", cancelled=bool)
async def cancel(request: Request) -> Any:
    """Stop a bulk action; what it has done stays done."""
    found = await _found(request, request.state.admin.operation, "operation")
    return {"cancelled": await request.state.admin.cancel(found.id)}


@answers("Destinations", destinations=[documents.DestinationDocument])
async def destinations(request: Request) -> Any:
    """Every destination that is configured, or has rows."""
    return {"destinations": (await stats(request))["destinations"]}


@answers(documents.DestinationDocument)
async def destination(request: Request) -> Any:
    """One destination: its deliveries, and what holds it up."""
    name, found = await _known(request), await stats(request)
    return next(one for one in found["destinations"] if one["name"] == name)


@answers("Paused", destination=str, paused=bool, reason=str, until=datetime | None)
async def pause(request: Request) -> Any:
    """Let nothing more be sent there, until a time or until it is resumed."""
    body: schemas.PauseBody = request.state.body
    name, until = await _known(request), read.moment(body.until, "until", 1)
    if until is not None and until <= datetime.now(UTC):
        raise invalid("until", "this time is over; write one to come, or a duration such as 30m")
    await request.state.admin.pause(name, body.reason, until)
    return {"destination": name, "paused": True, "reason": body.reason, "until": until}


@answers("Resumed", destination=str, resumed=bool)
async def resume(request: Request) -> Any:
    """End a pause, and close an open circuit."""
    name = await _known(request)
    return {"destination": name, "resumed": await request.state.admin.resume(name)}


@answers("Tested", destination=str, event_id=UUID)
async def test(request: Request) -> Any:
    """Write an event that shows whether deliveries arrive there."""
    name = await _known(request)
    return {"destination": name, "event_id": await request.state.admin.test(name)}


async def _known(request: Request) -> str:
    name = str(request.path_params["name"])
    names = await request.state.admin.names() if "\0" not in name else ()
    if name not in names:
        raise Problem(404, f"No destination is called {name!r}{did_you_mean(name, names)}")
    return name


@answers("Audits", audit=[AuditRow], cursor=str | None)
async def audit(request: Request) -> Any:
    """List what operators did, newest first."""
    return await _page(request, "audit", request.state.admin.audits, number, documents.audits)


@answers("Alive", alive=bool)
async def livez(request: Request) -> Any:
    """Answer as long as this process runs."""
    return {"alive": True}


@answers("Health", ready=bool, problems=[FlowProblem])
async def readyz(request: Request) -> Response:
    """Check that work flows: 503 and the reasons where it does not."""
    health: Health = await request.app.service.health()
    user, document = request.state.user, documents.health(health)
    if user is not None and user.by == "token":
        document = msgspec.to_builtins(health)
    else:
        # Probes need no session, and whether it was ended is not asked of the database.
        document["problems"] = [{**one, "destination": None} for one in document["problems"]]
    return answer(_redacted(request, document), 200 if health.ready else 503)


async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    from relaybox.operate.metrics import exposition

    body, media_type = await exposition(request.state.admin, request.app.outbox.settings.namespace)
    return Response(body, headers={"content-type": media_type})


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as JSON, in ASCII: stored texts may not be encodable as UTF-8."""
    body = documents.to_json(document, separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def _redacted(request: Request, document: Any) -> Any:
    return redacted(document, request.app.rules)
