"""``/failures``: what failed for good, in groups that have one cause."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.show import plural
from relaybox.web.templating import page


async def failures(request: Request) -> Response:
    """The groups, of one destination where the URL names it."""
    admin = request.state.admin
    chosen = request.query_params.get("destination") or None
    names = [name for name in await admin.names() if name]
    found = await admin.failures(chosen if chosen in names else None)
    spoken = f"{plural(len(found.groups), 'group')} of failures"
    return page(request, "failures.html", failures=found, names=names, chosen=chosen, spoken=spoken)
