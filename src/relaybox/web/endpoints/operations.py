"""``/api/operations``, ``/api/operations/{id}``, ``POST /api/operations/{id}/cancel``, ``/api/audit``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.operate.actions import Action
from relaybox.stores.journal import Operation
from relaybox.stores.ledger import Filter
from relaybox.web import documents, read, render, schemas
from relaybox.web.problems import not_found
from relaybox.web.redact import Rules
from relaybox.web.security import prefix
from relaybox.web.signed import number


async def operations(request: Request) -> documents.OperationsDocument:
    """Bulk actions in the background, newest first."""
    query: schemas.LimitQuery = request.state.query
    found = await request.state.admin.operations(query.limit)
    return documents.OperationsDocument(operations=[document(one, request.app.rules) for one in found])


async def operation(request: Request) -> documents.OperationDocument:
    """A bulk action: how far it is."""
    id_ = read.identifier(request.path_params["id"])
    found = await request.state.admin.operation(id_)
    if found is None:
        raise not_found(f"No operation has the id {id_}.")
    return document(found, request.app.rules)


async def cancel(request: Request) -> documents.CancelledDocument:
    """Stop a bulk action; what it has done stays done."""
    id_ = read.identifier(request.path_params["id"])
    if await request.state.admin.operation(id_) is None:
        raise not_found(f"No operation has the id {id_}.")
    return documents.CancelledDocument(cancelled=await request.state.admin.cancel(id_))


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


async def started(
    request: Request, action: Action, filter: Filter, *, to: str | None, rate: float | None
) -> Response:
    """Start a bulk action; the answer says where to look how far it is."""
    bulk = request.app.service.bulk()
    begun = await bulk.start(request.state.user.name, action, filter, to=to, rate=rate)
    location = f"{prefix(request)}/api/operations/{begun.id}"
    return render.answer(document(begun, request.app.rules), 202, {"location": location})


def document(one: Operation, rules: Rules) -> documents.OperationDocument:
    """A bulk action."""
    about = {"details": render.details(one.details, rules), "error": render.scrubbed(one.error, rules)}
    return render.made(documents.OperationDocument, one, **about)
