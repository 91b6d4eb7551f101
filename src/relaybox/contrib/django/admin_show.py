"""How the admin's pages say things: states, moments, ages and documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import urlencode

import msgspec
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator

from relaybox.ledger import Content, Entry, State
from relaybox.why import Reason

NOTHING = "–"
ERROR_LENGTH = 60
LONGEST = 100_000
"""How many characters of a document a page shows."""

_html = cast("Callable[..., str]", format_html)
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """One number and its unit, such as ``3 min``."""
    whole = max(0, int(seconds))
    size, unit = next((unit for unit in _UNITS if whole >= unit[0]), _UNITS[-1])
    return f"{whole // size}\N{NO-BREAK SPACE}{unit}"


def age(entry: Entry) -> str:
    """How long ago it was emitted, by the database's clock."""
    elapsed = duration((entry.seen_at - entry.created_at).total_seconds())
    return _html('<time datetime="{}" title="{}">{}</time>', *_spelled(entry.created_at), elapsed)


def moment(value: datetime, seen_at: datetime) -> str:
    """A moment in the zone of the project, and how far away it was."""
    distance = (value - seen_at).total_seconds()
    near = f"in {duration(distance)}" if distance > 0 else f"{duration(-distance)} ago"
    local = timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S %Z")
    return _html(
        '<time datetime="{}" title="{}">{}</time> <span class="quiet">{}</span>',
        *_spelled(value),
        local,
        near,
    )


def badge(state: State) -> str:
    """The state, with a colour of its own."""
    return _html('<span class="relaybox-state {}">{}</span>', state.value, state.value)


def next_attempt(entry: Entry) -> str:
    """When it is sent next, in a few words."""
    match entry.state:
        case State.DUE:
            return "now"
        case State.SENDING:
            return "under way"
        case State.PARKED:
            return "in its turn"
    if entry.next_attempt_at is None:
        return NOTHING
    left = duration((entry.next_attempt_at - entry.seen_at).total_seconds())
    return _html('<time datetime="{}" title="{}">in {}</time>', *_spelled(entry.next_attempt_at), left)


def error(entry: Entry) -> str:
    """The beginning of what went wrong last."""
    if not entry.error_message or entry.state is State.DELIVERED:
        return NOTHING
    text = " ".join(entry.error_message.split())
    return _html(
        '<span title="{}">{}</span>', Truncator(text).chars(500), Truncator(text).chars(ERROR_LENGTH)
    )


def sentence(reason: Reason) -> str:
    """Why a delivery is where it is."""
    parts = f"It {reason.text}.".split("`")
    forms = ("{}", "<code>{}</code>")
    return _html("".join(forms[index % 2] for index in range(len(parts))), *parts)


def payload(content: Content) -> str:
    """The payload as people read it, or how much of what it is."""
    if content.payload is not None:
        return document(content.payload)
    return f"{len(content.payload_data or b''):,} bytes of {content.payload_encoding}"


def document(text: Any) -> str:
    """A JSON text, one value a line, with every number as it was written."""
    try:
        spread = msgspec.json.format(str(text), indent=2)
    except msgspec.DecodeError:
        spread = str(text)
    left = len(spread) - LONGEST
    return spread if left <= 0 else f"{spread[:LONGEST]}\n… and {left:,} characters more"


def facts_of_event(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """What all deliveries of the event have in common."""
    yield "Event type", _search(listing, entry.event_type, entry.event_type)
    aggregate = f"{entry.aggregate_type} {entry.aggregate_id}"
    yield "Aggregate", _search(listing, aggregate, aggregate)
    yield "Event ID", _html("<code>{}</code>", entry.event_id)
    yield "Idempotency key", _html("<code>{}</code>", entry.idempotency_key)
    yield "Emitted", moment(entry.created_at, entry.seen_at)


def facts_of_delivery(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """What is this delivery's own."""
    query = urlencode({"destination": entry.destination})
    yield "Destination", _html('<a href="{}?{}">{}</a>', listing, query, entry.destination or "(none)")
    yield "Delivery ID", _html("<code>{}</code>", entry.id)
    times = "once" if entry.crashes == 1 else f"{entry.crashes} times"
    crashes = f"; its relay died {times}" if entry.crashes else ""
    yield "Attempts", f"{entry.attempts} of {entry.max_attempts}{crashes}"
    if entry.ordering_key is not None:
        yield "Ordering key", _html("<code>{}</code>", entry.ordering_key)
    yield "Position", str(entry.position)
    if entry.lease_owner is not None:
        yield "Leased by", entry.lease_owner
    moments = (
        ("Leased until", entry.leased_until),
        ("Next attempt", None if entry.state is State.SENDING else entry.next_attempt_at),
        ("Last attempt", entry.last_attempt_at),
        ("Delivered", entry.delivered_at),
        ("Updated", entry.updated_at),
    )
    yield from ((name, moment(value, entry.seen_at)) for name, value in moments if value is not None)


def counted(numbers: dict[str, int]) -> str:
    """How many for which destination, such as ``2 to billing, 1 to search``."""
    return ", ".join(f"{number} to {name or '(none)'}" for name, number in sorted(numbers.items()))


def listing_of(model: Any, site: str) -> str:
    """The address of a model's list."""
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
    return str(reverse(name, current_app=site))


def _search(listing: str, query: str, text: str) -> str:
    return _html('<a href="{}?{}">{}</a>', listing, urlencode({"q": query}), text)


def _spelled(value: datetime) -> tuple[str, str]:
    """The moment for machines, and in full for people."""
    return value.isoformat(), value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
