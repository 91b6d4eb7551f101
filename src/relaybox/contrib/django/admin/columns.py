"""How Django's admin shows deliveries: the columns of the list, and the facts of one delivery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, cast
from urllib.parse import urlencode

import msgspec
from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator

from relaybox.contrib.django.conf import get_settings
from relaybox.contrib.django.models import OutboxEvent
from relaybox.core.redact import Rules, redacted_text
from relaybox.core.text import NOTHING, at, binary, cut, distance, duration
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Content, Entry, State

ERROR_LENGTH = 60

LONGEST = 100_000
"""Characters of a document that a page shows."""

html = cast("Callable[..., str]", format_html)


@admin.display(description="status")  # type: ignore[untyped-decorator]
def state(row: OutboxEvent) -> str:
    """Return the state as a badge."""
    return badge(row.entry.state)


def aggregate(row: OutboxEvent) -> str:
    """Return the aggregate, such as ``order 17``."""
    return f"{row.aggregate_type} {row.aggregate_id}"


@admin.display(description="attempts")  # type: ignore[untyped-decorator]
def attempts_made(row: OutboxEvent) -> str:
    """Return the attempts, such as ``2 of 5``."""
    return f"{row.attempts} of {row.max_attempts}"


def age(row: OutboxEvent) -> str:
    """Return the time since the event was emitted, by the database's clock."""
    entry: Entry = row.entry
    return _time(entry.created_at, duration((entry.seen_at - entry.created_at).total_seconds()))


def next_attempt(row: OutboxEvent) -> str:
    """Return when it is sent next."""
    words = {State.DUE: "now", State.SENDING: "under way", State.PARKED: "in its turn"}
    entry: Entry = row.entry
    if entry.state in words or entry.next_attempt_at is None:
        return words.get(entry.state, NOTHING)
    return _time(entry.next_attempt_at, distance(entry.next_attempt_at, entry.seen_at))


def error(row: OutboxEvent) -> str:
    """Return the start of the last error."""
    if not row.entry.error_message or row.entry.state is State.DELIVERED:
        return NOTHING
    text = Truncator(" ".join(row.entry.error_message.split()))
    return html('<span title="{}">{}</span>', text.chars(500), text.chars(ERROR_LENGTH))


COLUMNS = (state, aggregate, attempts_made, age, next_attempt, error)
"""The columns of the list that are not fields."""


def moment(value: datetime, seen_at: datetime) -> str:
    """Return a time in the project's time zone, and its distance from ``seen_at``."""
    local = timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S %Z")
    return html('{} <span class="quiet">{}</span>', _time(value, local), distance(value, seen_at))


def badge(state: State) -> str:
    """Return the state in its own colour."""
    return html('<span class="relaybox-state {}">{}</span>', state.value, state.value)


def _time(value: datetime, text: str) -> str:
    return html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), at(value), text)


def sentence(reason: Reason) -> str:
    """Return a sentence that explains a delivery's state."""
    parts = f"It {rules().scrub(reason.text)}.".split("`")
    forms = ("{}", "<code>{}</code>")
    return html("".join(forms[index % 2] for index in range(len(parts))), *parts)


def rules() -> Rules:
    """Return what to hide from everyone."""
    return Rules.of(get_settings().REDACT)


def scrubbed(text: str | None) -> str | None:
    """Return an error without secrets."""
    return text and rules().scrub(text)


def payload(content: Content) -> str:
    """Return the formatted payload, or the size and encoding of a binary one."""
    if content.payload is not None:
        return document(content.payload)
    return binary(content.payload_data, content.payload_encoding)


def document(text: Any) -> str:
    """Return JSON text with one value a line, without secrets; if it has none, its numbers are unchanged."""
    found = redacted_text(str(text), rules())
    with suppress(msgspec.DecodeError):
        if msgspec.json.decode(str(text)) == found:
            return cut(msgspec.json.format(str(text), indent=2), LONGEST)
    spread = json.dumps(found, indent=2, ensure_ascii=False)
    # A stored text may hold lone surrogates.
    return cut(spread.encode("utf-8", "replace").decode(), LONGEST)


def facts_of_event(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """Yield what all deliveries of the event share."""
    yield "Event type", _search(listing, entry.event_type)
    yield "Aggregate", _search(listing, f"{entry.aggregate_type} {entry.aggregate_id}")
    yield "Event ID", html("<code>{}</code>", entry.event_id)
    yield "Idempotency key", html("<code>{}</code>", entry.idempotency_key)
    yield "Emitted", moment(entry.created_at, entry.seen_at)


def facts_of_delivery(entry: Entry, listing: str) -> Iterator[tuple[str, str]]:
    """Yield what is specific to this delivery."""
    query = urlencode({"destination": entry.destination})
    yield "Destination", html('<a href="{}?{}">{}</a>', listing, query, entry.destination or "(none)")
    yield "Delivery ID", html("<code>{}</code>", entry.id)
    times = "once" if entry.crashes == 1 else f"{entry.crashes} times"
    crashes = f"; its relay died or was stopped {times}" if entry.crashes else ""
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


def _search(listing: str, query: str) -> str:
    return html('<a href="{}?{}">{}</a>', listing, urlencode({"q": query}), query)
