"""The endpoints of the API, in the order of the route table. Their docstrings are summaries in OpenAPI.

Actions on ids, and on filters that match few rows, are done at once. A filter that matches more than
``ledger.CAP`` rows is processed in the background, as with ``background`` or ``rate``.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.errors import did_you_mean
from relaybox.operate.admin import DestinationStats, Detail, Stats
from relaybox.operate.admin_actions import Action, Done, Named
from relaybox.operate.documents import counts_document, place_document
from relaybox.operate.health import Health
from relaybox.operate.why import Reason, is_alive
from relaybox.stores.ledger import EVERYTHING, Content, Filter
from relaybox.web import read, schemas, show
from relaybox.web.auth import number
from relaybox.web.problems import Problem, invalid
from relaybox.web.redact import Rules, redact, redacted_text
from relaybox.web.security import prefix

T = TypeVar("T", bound=Struct)
Answer: TypeAlias = Struct | Response
"""The result, or the operation that runs in the background."""

SCRUBBED = ("error_message", "error", "message", "reason", "retrying", "text")
"""Fields that may quote other systems."""


async def stats(request: Request) -> Struct:
    """Where everything is: counts, destinations and relays."""
    found, rows = await _stats(request)
    return schemas.StatsDocument(
        **counts_document(found.total), destinations=rows, relays=_relays(request, found)
    )


async def _stats(request: Request) -> tuple[Stats, list[schemas.DestinationDocument]]:
    admin, rules = request.state.admin, request.app.rules
    found, configured = await admin.stats(), await admin.destinations()
    return found, [_destination(one, configured.get(one.name), rules) for one in found.destinations]


async def series(request: Request) -> Struct:
    """What charts are drawn from, of the last hours."""
    query: schemas.SeriesQuery = request.state.query
    found = await request.state.admin.series(query.hours, query.destination)
    return schemas.SeriesDocument(step_seconds=found.step.total_seconds(), points=found.points)


async def relays(request: Request) -> Struct:
    """The relays that were seen last."""
    return schemas.RelaysDocument(relays=_relays(request, await request.state.admin.stats()))


def _relays(request: Request, found: Stats) -> list[Struct]:
    kind, rules = schemas.RelayDocument, request.app.rules
    return [_made(kind, one, rules, alive=is_alive(one)) for one in found.relays]


async def events(request: Request) -> Struct:
    """Deliveries that a filter is true of, newest first."""
    query: schemas.EventsQuery = request.state.query
    # A cursor stays valid if the page size changes.
    asked = msgspec.json.encode(replace(query, limit=1, cursor=None)).decode()
    ask = partial(request.state.admin.events, read.filter_of(query))
    found, cursor = await _page(request, f"events {asked}", ask, UUID)
    rows = _rendered(request, schemas.EventDocument, found.entries)
    return schemas.EventsDocument(events=rows, cursor=cursor)


def _rendered(request: Request, kind: type[Struct], values: Iterable[object]) -> list[Struct]:
    return [_made(kind, one, request.app.rules) for one in values]


async def _page(
    request: Request, about: str, ask: Callable[..., Awaitable[Any]], kind: Callable[[str], object]
) -> tuple[Any, str | None]:
    query, cursors = request.state.query, request.app.cursors
    found = await ask(limit=query.limit, cursor=cursors.open(about, query.cursor, kind))
    return found, cursors.seal(about, found.cursor)


async def event(request: Request) -> Struct:
    """A delivery, or every delivery of an event, with payload, headers and failed attempts."""
    found = await _found(request, request.state.admin.event)
    return schemas.DeliveriesDocument(deliveries=[_detail(one, request.app.rules) for one in found])


async def why(request: Request) -> Struct:
    """Why each delivery of an id is where it is."""
    found = await _found(request, request.state.admin.why)
    return schemas.ReasonsDocument(deliveries=[_reason(one, request.app.rules) for one in found])


async def _found(
    request: Request, ask: Callable[[UUID], Awaitable[Any]], what: str = "event and no delivery"
) -> Any:
    id_ = read.identifier(request.path_params["id"])
    if found := await ask(id_):
        return found
    raise Problem(404, f"No {what} has the id {id_}.")


async def failures(request: Request) -> Struct:
    """What failed for good, in groups of the same destination and the same error."""
    query: schemas.FailuresQuery = request.state.query
    found = await request.state.admin.failures(query.destination, limit=query.limit)
    groups = _rendered(request, schemas.FailureDocument, found.groups)
    return schemas.FailuresDocument(failures=groups, looked_at=found.looked_at, capped=found.capped)


async def dead_letters(request: Request) -> Struct:
    """What was given to dead-letter destinations, and why, newest first."""
    rules = request.app.rules
    found, cursor = await _page(request, "dead letters", request.state.admin.dead_letters, UUID)
    rows = [
        _made(schemas.DeadLetterDocument, row.entry, rules, origin=row.origin, reason=row.reason)
        for row in found.rows
    ]
    return schemas.DeadLettersDocument(dead_letters=rows, cursor=cursor)


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
    return await _act_on_all(request, "move", Filter(destination=body.from_), to=body.to)


async def _act(request: Request, action: Action, **options: str | None) -> Answer:
    body: schemas.ActionBody = request.state.body
    what = _what(body, everything=action == "retry")
    if isinstance(what, Filter):
        return await _act_on_all(request, action, what, **options)
    act = getattr(request.state.admin, action)
    return _told(action, await act(what, dry_run=body.dry_run, **options), body.dry_run)


async def _act_on_all(request: Request, action: Action, what: Filter, **options: str | None) -> Answer:
    admin, body = request.state.admin, request.state.body
    counted = await admin.count(action, what, **options)
    if body.dry_run:
        return _told(action, Done(counted.count), True, counted.capped)
    if body.background or counted.capped or body.rate is not None:
        bulk, actor = request.app.service.bulk(), request.state.user.name
        begun = await bulk.start(actor, action, what, rate=body.rate, **options)
        location = f"{prefix(request)}/api/operations/{begun.id}"
        [operation] = _rendered(request, schemas.OperationDocument, [begun])
        return answer(operation, 202, {"location": location})
    act = getattr(admin, action)
    return _told(action, await act(what.destination if action == "move" else what, **options), False)


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


def _told(action: Action, done: Done, dry_run: bool, capped: bool = False) -> Struct:
    return schemas.DONE[action](
        **{schemas.PAST[action]: done.affected},
        skipped=done.skipped,
        unknown=list(done.unknown),
        dry_run=dry_run,
        capped=capped,
    )


async def operations(request: Request) -> Struct:
    """Bulk actions in the background, newest first."""
    found = await request.state.admin.operations(request.state.query.limit)
    return schemas.OperationsDocument(operations=_rendered(request, schemas.OperationDocument, found))


async def operation(request: Request) -> Struct:
    """A bulk action: how far it is."""
    found = await _found(request, request.state.admin.operation, "operation")
    return _made(schemas.OperationDocument, found, request.app.rules)


async def cancel(request: Request) -> Struct:
    """Stop a bulk action; what it has done stays done."""
    found = await _found(request, request.state.admin.operation, "operation")
    return schemas.CancelledDocument(cancelled=await request.state.admin.cancel(found.id))


async def destinations(request: Request) -> Struct:
    """Every destination that is configured, or has rows."""
    _, rows = await _stats(request)
    return schemas.DestinationsDocument(destinations=rows)


async def destination(request: Request) -> Struct:
    """One destination: its deliveries, and what holds it up."""
    name, (_, rows) = await _known(request), await _stats(request)
    [found] = [one for one in rows if one.name == name]
    return found


async def pause(request: Request) -> Struct:
    """Let nothing more be sent there, until a time or until it is resumed."""
    body: schemas.PauseBody = request.state.body
    name, until = await _known(request), read.moment(body.until, "until", 1)
    if until is not None and until <= datetime.now(UTC):
        raise invalid("until", "this time is over; write one to come, or a duration such as 30m")
    await request.state.admin.pause(name, body.reason, until)
    return schemas.PausedDocument(destination=name, paused=True, reason=body.reason, until=until)


async def resume(request: Request) -> Struct:
    """End a pause, and close an open circuit."""
    name = await _known(request)
    return schemas.ResumedDocument(destination=name, resumed=await request.state.admin.resume(name))


async def test(request: Request) -> Struct:
    """Write an event that shows whether deliveries arrive there."""
    name = await _known(request)
    return schemas.TestedDocument(destination=name, event_id=await request.state.admin.test(name))


async def _known(request: Request) -> str:
    name = str(request.path_params["name"])
    names = await request.state.admin.names() if "\0" not in name else ()
    if name not in names:
        raise Problem(404, f"No destination is called {name!r}{did_you_mean(name, names)}")
    return name


async def audit(request: Request) -> Struct:
    """What operators did, newest first."""
    found, cursor = await _page(request, "audit", request.state.admin.audits, number)
    rows = _rendered(request, schemas.AuditDocument, found.rows)
    return schemas.AuditsDocument(audit=rows, cursor=cursor)


async def livez(request: Request) -> Struct:
    """Whether this process answers."""
    return schemas.AliveDocument(alive=True)


async def readyz(request: Request) -> Response:
    """Whether work flows: 503 and the reasons where it does not."""
    health: Health = await request.app.service.health()
    problems: list[Any] = _rendered(request, schemas.TroubleDocument, health.problems)
    if request.state.user is None:
        # Hide what follows the colon, addresses and texts of other systems, from anonymous callers.
        problems = [replace(one, reason=one.reason.partition(":")[0]) for one in problems]
    document = schemas.HealthDocument(ready=health.ready, problems=problems)
    return answer(document, 200 if health.ready else 503)


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    from relaybox.operate.metrics import exposition

    namespace = request.app.outbox.settings.namespace
    body, media_type = await exposition(request.state.admin, namespace)
    return Response(body, headers={"content-type": media_type})


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as JSON, in ASCII: stored texts may not be encodable as UTF-8."""
    body = json.dumps(msgspec.to_builtins(document, str_keys=True), separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def _made(kind: type[T], value: object, rules: Rules, **more: Any) -> T:
    """Return a document with the attributes of a value, redacted; ``more`` overrides them."""
    found = {name: getattr(value, name) for name in kind.__struct_fields__ if name not in more} | more
    for name in SCRUBBED:
        if found.get(name) is not None:
            found[name] = rules.scrub(found[name])
    if "details" in found:
        # Convert values such as UUIDs to text first.
        found["details"] = redact(json.loads(json.dumps(dict(found["details"]), default=str)), rules)
    return kind(**found)


def _destination(
    one: DestinationStats, configured: Destination | None, rules: Rules
) -> schemas.DestinationDocument:
    """Return a destination; of its settings, nothing that may be secret."""
    paused, circuit = place_document(one.place).values()
    if circuit["reason"]:
        circuit["reason"] = rules.scrub(circuit["reason"])
    settings = {name: getattr(configured, name, None) for name in ("ordered", "max_attempts", "dead_letter")}
    return _made(
        schemas.DestinationDocument,
        one,
        rules,
        **counts_document(one.counts),
        **settings,
        sink=None if configured is None else show.place(configured.sink),
        retrying=one.counts.retrying,
        paused=paused and schemas.PauseDocument(**paused),
        circuit=schemas.CircuitDocument(**circuit),
    )


def _detail(found: Detail, rules: Rules) -> Struct:
    content = found.content or Content(None, None, None, "null")
    return _made(
        schemas.DetailDocument,
        found.entry,
        rules,
        payload=redacted_text(content.payload, rules),
        payload_encoding=content.payload_encoding,
        payload_size=None if content.payload_data is None else len(content.payload_data),
        headers=redacted_text(content.headers, rules),
        failed_attempts=[_made(schemas.AttemptDocument, one, rules) for one in found.attempts],
    )


def _reason(found: Reason, rules: Rules) -> schemas.ReasonDocument:
    return _made(
        schemas.ReasonDocument,
        found.entry,
        rules,
        why=found.kind,
        text=found.text,
        until=found.until,
        behind=None if found.behind is None else _reason(found.behind, rules),
    )
