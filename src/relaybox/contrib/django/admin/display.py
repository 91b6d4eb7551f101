"""How the admin's pages show states, moments and ages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator

from relaybox.stores.ledger import Entry, State

NOTHING = "–"
ERROR_LENGTH = 60

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
    elapsed = duration((entry.seen_at - entry.created_at).total_seconds())
    return html('<time datetime="{}" title="{}">{}</time>', *_spelled(entry.created_at), elapsed)


def moment(value: datetime, seen_at: datetime) -> str:
    """Return a moment in the project's time zone, and how far away it was."""
    distance = (value - seen_at).total_seconds()
    near = f"in {duration(distance)}" if distance > 0 else f"{duration(-distance)} ago"
    local = timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S %Z")
    return html(
        '<time datetime="{}" title="{}">{}</time> <span class="quiet">{}</span>',
        *_spelled(value),
        local,
        near,
    )


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
    return html('<time datetime="{}" title="{}">in {}</time>', *_spelled(entry.next_attempt_at), left)


def error(entry: Entry) -> str:
    """Return the beginning of the last error."""
    if not entry.error_message or entry.state is State.DELIVERED:
        return NOTHING
    text = " ".join(entry.error_message.split())
    return html('<span title="{}">{}</span>', Truncator(text).chars(500), Truncator(text).chars(ERROR_LENGTH))


def _spelled(value: datetime) -> tuple[str, str]:
    """Return the moment for machines, and in full for people."""
    return value.isoformat(), value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
