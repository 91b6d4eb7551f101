"""``POST /api/retry``, ``/api/replay``, ``/api/discard``, ``/api/move``.

What ids name, and what few rows a filter is true of, is done at once. More than ``ledger.CAP`` rows take
longer than anybody waits for an answer: they are done in the background, as with ``background``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from relaybox.operate.admin import Action, Done, Named
from relaybox.stores.ledger import EVERYTHING, Filter
from relaybox.web import documents, read, schemas
from relaybox.web.endpoints.operations import started
from relaybox.web.problems import Problem, invalid

Answer: TypeAlias = documents.DoneDocument | Response
"""What was done, or the operation that does it."""


async def retry(request: Request) -> Answer:
    """Start failed deliveries anew, with all their attempts; without a body, all of them."""
    return await _act(request, "retry", documents.RetriedDocument, "retried")


async def replay(request: Request) -> Answer:
    """Send final deliveries once more, as new rows of the same events."""
    return await _act(request, "replay", documents.ReplayedDocument, "replayed", to=request.state.body.to)


async def discard(request: Request) -> Answer:
    """Give up failed or pending deliveries; the next one of each key becomes due."""
    return await _act(request, "discard", documents.DiscardedDocument, "discarded")


async def move(request: Request) -> Answer:
    """Give a destination's pending and failed deliveries to another."""
    body: schemas.MoveBody = request.state.body
    what = Filter(destination=body.from_)

    async def act(_: Filter, to: str) -> Done:
        return await request.state.admin.move(body.from_, to)  # type: ignore[no-any-return]

    return await _act_on_all(request, "move", what, act, documents.MovedDocument, "moved", to=body.to)


async def _act(
    request: Request,
    action: Literal["retry", "replay", "discard"],
    kind: type[documents.DoneDocument],
    verb: str,
    to: str | None = None,
) -> Answer:
    body: schemas.ActionBody = request.state.body
    what = _what(body, everything=action == "retry")
    act = getattr(request.state.admin, action)
    if isinstance(what, Filter):
        return await _act_on_all(request, action, what, act, kind, verb, to=to)
    options = {} if to is None else {"to": to}
    return _told(kind, verb, await act(what, dry_run=body.dry_run, **options), body.dry_run)


async def _act_on_all(
    request: Request,
    action: Action,
    what: Filter,
    act: Callable[..., Awaitable[Done]],
    kind: type[documents.DoneDocument],
    verb: str,
    *,
    to: str | None,
) -> Answer:
    body = request.state.body
    options = {} if to is None else {"to": to}
    counted = await request.state.admin.count(action, what, **options)
    if body.dry_run:
        return _told(kind, verb, Done(counted.count), True, counted.capped)
    if body.background or counted.capped or body.rate is not None:
        return await started(request, action, what, to=to, rate=body.rate)
    return _told(kind, verb, await act(what, **options), False)


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


def _told(
    kind: type[documents.DoneDocument], verb: str, done: Done, dry_run: bool, capped: bool = False
) -> documents.DoneDocument:
    return kind(
        **{verb: done.affected},
        skipped=done.skipped,
        unknown=list(done.unknown),
        dry_run=dry_run,
        capped=capped,
    )
