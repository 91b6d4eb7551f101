"""``/audit``: who did what."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.pages.operations import told
from relaybox.web.signed import number
from relaybox.web.templating import page, url_of


async def audit(request: Request) -> Response:
    """What operators did, newest first."""
    text = request.query_params.get("cursor", "")
    cursor = _cursor(text)
    found = await request.state.admin.audits(cursor=cursor)
    url = url_of(request)
    return page(
        request,
        "audit.html",
        rows=[(row, told(row.details, request.app.rules)) for row in found.rows],
        cursor=cursor,
        next=None if found.cursor is None else url("/audit", cursor=found.cursor),
        newest=None if cursor is None else url("/audit"),
    )


def _cursor(text: str) -> int | None:
    try:
        return number(text)
    except ValueError:
        return None
