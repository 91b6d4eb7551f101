"""``/dead-letters``: copies of what failed for good, and why."""

from __future__ import annotations

from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.templating import page, url_of


async def dead_letters(request: Request) -> Response:
    """Deliveries at the destinations that others name as ``dead_letter``."""
    admin = request.state.admin
    cursor = _cursor(request.query_params.get("cursor", ""))
    found = await admin.dead_letters(cursor=cursor)
    url = url_of(request)
    return page(
        request,
        "dead_letters.html",
        letters=found,
        configured=any(one.dead_letter for one in (await admin.destinations()).values()),
        cursor=cursor,
        next=None if found.cursor is None else url("/dead-letters", cursor=found.cursor),
        newest=None if cursor is None else url("/dead-letters"),
    )


def _cursor(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
