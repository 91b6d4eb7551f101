"""``/failures``: what failed for good, in groups; ``/dead-letters``: copies of it, and why."""

from __future__ import annotations

from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web import read
from relaybox.web.show import plural
from relaybox.web.templating import page, paging


async def failures(request: Request) -> Response:
    """The groups, of one destination where the URL names it."""
    admin = request.state.admin
    chosen = request.query_params.get("destination") or None
    names = [name for name in await admin.names() if name]
    found = await admin.failures(chosen if chosen in names else None)
    spoken = f"{plural(len(found.groups), 'group')} of failures"
    return page(request, "failures.html", failures=found, names=names, chosen=chosen, spoken=spoken)


async def dead_letters(request: Request) -> Response:
    """Deliveries at the destinations that others name as ``dead_letter``."""
    admin = request.state.admin
    cursor = read.parsed(UUID, request.query_params.get("cursor", ""))
    found = await admin.dead_letters(cursor=cursor)
    return page(
        request,
        "dead_letters.html",
        letters=found,
        configured=any(one.dead_letter for one in (await admin.destinations()).values()),
        **paging(request, "/dead-letters", cursor, found.cursor),
    )
