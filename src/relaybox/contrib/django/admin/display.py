"""What the admin's pages show: the columns of the list, and the page of one delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import urlencode
from uuid import UUID

import msgspec
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator

from relaybox.contrib.django.admin.changelist import ACTIONS
from relaybox.operate.admin import Admin
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Attempt, Content, Entry, Filter, State

NOTHING = "–"
ERROR_LENGTH = 60

LONGEST = 100_000
"""How many characters of a document a page shows."""

SIBLINGS = 50
"""How many other deliveries of the event are named."""

html = cast("Callable[..., str]", format_html)
"""``format_html``, typed."""

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return one number and its unit, such as ``3 min``."""
    whole = max(0, int(seconds))
    size, unit = next((unit for unit in _UNITS if whole >= unit[0]), _UNITS[-1])
    return f"{whole // size}\N{NO-BREAK SPACE}{unit}"


def age(entry: Entry) -> str:
    """Return how long ago it was emitted, by the database's clock."""
    return _time(entry.created_at, duration((entry.seen_at - entry.created_at).total_seconds()))


def moment(value: datetime, seen_at: datetime) -> str:
    """Return a moment in the project's time zone, and how far away it was."""
    distance = (value - seen_at).total_seconds()
    near = f"in {duration(distance)}" if distance > 0 else f"{duration(-distance)} ago"
    local = timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S %Z")
    return html('{} <span class="quiet">{}</span>', _time(value, local), near)


def badge(state: State) -> str:
    """Return the state, with a colour of its own."""
    return html('<span class="relaybox-state {}">{}</span>', state.value, state.value)


def next_attempt(entry: Entry) -> str:
    """Return in a few words when it is sent next."""
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
    return _time(entry.next_attempt_at, f"in {left}")


def error(entry: Entry) -> str:
    """Return the beginning of the last error."""
    if not entry.error_message or entry.state is State.DELIVERED:
        return NOTHING
    text = " ".join(entry.error_message.split())
    return html('<span title="{}">{}</span>', Truncator(text).chars(500), Truncator(text).chars(ERROR_LENGTH))


def _time(value: datetime, text: str) -> str:
    """Return the text, with the moment for machines and in full for people."""
    full = value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), full, text)


@dataclass(frozen=True, slots=True)
class Detailed:
    """A delivery, why it is where it is, what can be done about it, and where else its event goes."""

    entry: Entry
    content: Content
    attempts: tuple[Attempt, ...]
    reason: Reason
    offered: tuple[str, ...]
    siblings: tuple[Entry, ...]


async def look(admin: Admin, id_: UUID) -> Detailed | None:
    """Return the delivery of that id; None if there is no such delivery, or it is just being removed."""
    own = next((detail for detail in await admin.event(id_) if detail.entry.id == id_), None)
    reason = next((reason for reason in await admin.why(id_) if reason.entry.id == id_), None)
    if own is None or own.content is None or reason is None:
        return None
    asked = {name: await action.ask(admin, [id_], dry_run=True) for name, action in ACTIONS.items()}
    page = await admin.events(Filter(event_id=own.entry.event_id), limit=SIBLINGS + 1)
    return Detailed(
        own.entry,
        own.content,
        own.attempts,
        reason,
        tuple(name for name, done in asked.items() if done.affected),
        tuple(entry for entry in page.entries if entry.id != id_),
    )


def sentence(reason: Reason) -> str:
    """Return the sentence that says why a delivery is where it is."""
    parts = f"It {reason.text}.".split("`")
    forms = ("{}", "<code>{}</code>")
    return html("".join(forms[index % 2] for index in range(len(parts))), *parts)


def payload(content: Content) -> str:
    """Return the payload as people read it, or its size and encoding."""
    if content.payload is not None:
        return document(content.payload)
    return f"{len(content.payload_data or b''):,} bytes of {content.payload_encoding}"


def document(text: Any) -> str:
    """Return a JSON text with one value a line and every number as it was written."""
    try:
        spread = msgspec.json.format(str(text), indent=2)
    except msgspec.DecodeError:
        spread = str(text)
    left = len(spread) - LONGEST
    return spread if left <= 0 else f"{spread[:LONGEST]}\n… and {left:,} characters more"


def facts_of_event(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """Yield what all deliveries of the event have in common."""
    yield "Event type", _search(listing, entry.event_type)
    yield "Aggregate", _search(listing, f"{entry.aggregate_type} {entry.aggregate_id}")
    yield "Event ID", html("<code>{}</code>", entry.event_id)
    yield "Idempotency key", html("<code>{}</code>", entry.idempotency_key)
    yield "Emitted", moment(entry.created_at, entry.seen_at)


def facts_of_delivery(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """Yield what belongs to this delivery alone."""
    query = urlencode({"destination": entry.destination})
    yield "Destination", html('<a href="{}?{}">{}</a>', listing, query, entry.destination or "(none)")
    yield "Delivery ID", html("<code>{}</code>", entry.id)
    times = "once" if entry.crashes == 1 else f"{entry.crashes} times"
    crashes = f"; its relay died {times}" if entry.crashes else ""
    yield "Attempts", f"{entry.attempts} of {entry.max_attempts}{crashes}"
    if entry.ordering_key is not None:
        yield "Ordering key", html("<code>{}</code>", entry.ordering_key)
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


def listing_of(model: Any, site: str) -> str:
    """Return the address of a model's list."""
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
    return str(reverse(name, current_app=site))


def _search(listing: str, query: str) -> str:
    return html('<a href="{}?{}">{}</a>', listing, urlencode({"q": query}), query)
