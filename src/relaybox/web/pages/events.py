"""``/events``: deliveries by what the URL asks for; ``/failures``: what failed for good, in groups;
``/dead-letters``: copies of it, and why. And filters, as URLs and forms have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relaybox.errors import ConfigError
from relaybox.stores.ledger import Choice, Filter, Page
from relaybox.web import read
from relaybox.web.problems import Problem
from relaybox.web.schemas import Criteria
from relaybox.web.show import plural
from relaybox.web.templating import page, paging

FIELDS = {
    "status": "State",
    "destination": "Destination",
    "event_type": "Event type",
    "aggregate_type": "Aggregate type",
    "aggregate_id": "Aggregate id",
    "ordering_key": "Ordering key",
    "event_id": "Event id",
    "since": "Emitted since",
    "until": "Emitted before",
    "error": "Error holds",
    "fingerprint": "Group of failures",
}
"""The parameters of a filter, and what people call them."""
CHOICES = tuple(one for one in get_args(Choice) if one not in ("processing", "completed"))
BULK = {
    "failed": (("retry", "Retry all…"), ("discard", "Discard all…")),
    "delivered": (("replay", "Replay all…"),),
    "discarded": (("replay", "Replay all…"),),
    "pending": (("discard", "Discard all…"),),
}
"""What can be done to everything that matches a filter of that state."""


class Wrong(ValueError):
    """A parameter that cannot be meant so; the message says which, and what to write."""


async def events(request: Request) -> Response:
    """A page of them, with the filter as it was given, right or wrong."""
    admin = request.state.admin
    names = [name for name in await admin.names() if name]
    given = chosen(request.query_params)
    wrong = ""
    found = Page((), None)
    cursor = None
    try:
        cursor = _cursor(request.query_params.get("cursor"))
        found = await admin.events(filter_of(given), cursor=cursor)
    except (Wrong, ConfigError) as error:
        wrong = str(error)
    return page(
        request,
        "events.html",
        status=400 if wrong else 200,
        entries=found.entries,
        given={field: given.get(field, "") for field in FIELDS},
        chosen=given,
        names=names,
        choices=CHOICES,
        bulk=BULK.get(given.get("status", ""), ()),
        wrong=wrong,
        **paging(request, "/events", cursor, found.cursor, **given),
    )


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


def chosen(given: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a filter that are not empty; forms send the others too."""
    texts = ((name, str(given.get(name, "")).strip()) for name in FIELDS)
    return {name: text for name, text in texts if text}


def filter_of(given: Mapping[str, str]) -> Filter:
    """The filter; raises ``Wrong``."""
    try:
        return read.filter_of(msgspec.convert(given, Criteria, strict=False))
    except msgspec.ValidationError as error:
        what, _, name = str(error).rpartition(" - at `$.")
        raise Wrong(f"{FIELDS.get(name.rstrip('`'), 'Filter')}: {what or error}.") from None
    except Problem as error:
        raise Wrong(error.detail) from None


def _cursor(text: str | None) -> UUID | None:
    """Where a list goes on; raises ``Wrong``."""
    place = read.parsed(UUID, text or "")
    if text and place is None:
        raise Wrong("The address names no place in the list; begin with the newest again.")
    return place
