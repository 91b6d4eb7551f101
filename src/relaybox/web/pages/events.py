"""``/events``: deliveries by what the URL asks for, newest first."""

from __future__ import annotations

from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from relaybox.errors import ConfigError
from relaybox.stores.ledger import Choice, Page
from relaybox.web.pages.filters import FIELDS, Wrong, chosen, cursor_of, filter_of
from relaybox.web.templating import page, url_of

CHOICES = tuple(one for one in get_args(Choice) if one not in ("processing", "completed"))
BULK = {
    "failed": (("retry", "Retry all…"), ("discard", "Discard all…")),
    "delivered": (("replay", "Replay all…"),),
    "discarded": (("replay", "Replay all…"),),
    "pending": (("discard", "Discard all…"),),
}
"""What can be done to everything that matches a filter of that state."""


async def events(request: Request) -> Response:
    """A page of them, with the filter as it was given, right or wrong."""
    admin = request.state.admin
    names = [name for name in await admin.names() if name]
    given = chosen(request.query_params)
    wrong = ""
    found = Page((), None)
    cursor = None
    try:
        cursor = cursor_of(request.query_params.get("cursor"))
        found = await admin.events(filter_of(given), cursor=cursor)
    except (Wrong, ConfigError) as error:
        wrong = str(error)
    url = url_of(request)
    return page(
        request,
        "events.html",
        status=400 if wrong else 200,
        entries=found.entries,
        next=None if found.cursor is None else url("/events", **given, cursor=found.cursor),
        newest=None if cursor is None else url("/events", **given),
        given={field: given.get(field, "") for field in FIELDS},
        chosen=given,
        names=names,
        choices=CHOICES,
        bulk=BULK.get(given.get("status", ""), ()),
        cursor=cursor,
        wrong=wrong,
    )
