"""``/events/{id}``: where an event is, why, and what happened to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from relaybox.operate.admin import Detail
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Content, Entry, State
from relaybox.web import read, show
from relaybox.web.pages.destinations import Mood
from relaybox.web.redact import HIDDEN, Rules, redacted_text
from relaybox.web.templating import error_page, page

LONGEST = 100_000
"""How many characters of a document are shown."""

MOODS: dict[str, Mood] = {
    "delivered": "good",
    "handed_over": "good",
    "failed": "bad",
    "paused": "warn",
    "circuit_open": "warn",
    "circuit_half_open": "warn",
    "unrouted": "warn",
    "unknown_destination": "warn",
    "not_relayed": "warn",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened to a delivery, or will; ``kind`` names its shape."""

    kind: str
    title: str
    at: datetime | None
    text: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """A delivery as the page shows it."""

    entry: Entry
    why: str
    mood: Mood
    steps: tuple[Step, ...]
    facts: tuple[tuple[str, str], ...]
    actions: tuple[tuple[str, str], ...]
    headers: str


async def event(request: Request) -> Response:
    """The event of that id with all its deliveries, or the delivery of that id."""
    admin = request.state.admin
    id_ = read.parsed(UUID, request.path_params["id"])
    details = () if id_ is None else await admin.event(id_)
    if id_ is None or not details:
        gone = "No delivery and no event has this id. Delivered ones are removed after their retention."
        return error_page(request, 404, "No such event", gone)
    reasons = {reason.entry.id: reason for reason in await admin.why(id_)}
    allowed: Rules = request.app.rules
    shown = [_shown(one, reasons.get(one.entry.id), allowed) for one in details]
    payload = _payload(details[0].content, allowed)
    return page(
        request,
        "event.html",
        event=details[0].entry,
        deliveries=shown,
        payload=payload,
        headers=shown[0].headers,
        redacted=HIDDEN in payload,
        spoken=", ".join(f"{one.entry.destination}: {one.entry.state}" for one in shown),
    )


def _shown(one: Detail, reason: Reason | None, allowed: Rules) -> Shown:
    return Shown(
        one.entry,
        "is where its state says" if reason is None else allowed.scrub(reason.text),
        "" if reason is None else MOODS.get(reason.kind, ""),
        tuple(_steps(one, reason, allowed)),
        tuple(_facts(one.entry)),
        tuple(_actions(one.entry)),
        "" if one.content is None else _document(redacted_text(one.content.headers, allowed)),
    )


def _steps(one: Detail, reason: Reason | None, allowed: Rules) -> Iterator[Step]:
    entry = one.entry
    yield Step("emitted", "Emitted", entry.created_at)
    for attempt in one.attempts:
        yield Step(
            "failed",
            f"Attempt {attempt.attempt} failed",
            attempt.failed_at,
            allowed.scrub(attempt.error_message),
            attempt.relay,
        )
    match entry.state:
        case State.DELIVERED:
            yield Step("delivered", "Delivered", entry.delivered_at)
        case State.FAILED:
            yield Step("failed", "Failed for good", entry.updated_at)
        case State.DISCARDED:
            yield Step("discarded", "Discarded", entry.updated_at)
        case State.SENDING:
            yield Step("next", "Being sent, its lease ends", entry.leased_until, by=entry.lease_owner or "")
        case State.SCHEDULED | State.DUE:
            yield Step("next", "Next attempt", entry.next_attempt_at)
        case State.PARKED:
            until = None if reason is None else reason.until
            yield Step("next", "Its turn comes after those before it", until)


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    yield "Delivery id", str(entry.id)
    yield "Position", str(entry.position)
    yield "Attempts", f"{entry.attempts} of {entry.max_attempts}"
    if entry.crashes:
        yield "Relays that died with it", str(entry.crashes)
    if entry.ordering_key is not None:
        yield "Ordering key", entry.ordering_key
    if entry.lease_owner is not None:
        yield "Last held by", entry.lease_owner
    yield "Updated", f"{show.spelled(entry.updated_at)} UTC"


def _actions(entry: Entry) -> Iterator[tuple[str, str]]:
    """Those that are not just done lead to a question first."""
    if entry.state is State.FAILED or entry.backing_off:
        yield "retry", "Retry" if entry.state is State.FAILED else "Retry now"
    if entry.state in (State.DELIVERED, State.FAILED, State.DISCARDED):
        yield "replay", "Replay…"
    if entry.state in (State.DUE, State.SCHEDULED, State.PARKED, State.FAILED):
        yield "discard", "Discard…"


def _payload(content: Content | None, allowed: Rules) -> str:
    if content is None:
        return "The row is gone."
    if content.payload is None:
        return f"{len(content.payload_data or b''):,} bytes of {content.payload_encoding}"
    return _document(redacted_text(content.payload, allowed))


def _document(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]}\n… and {left:,} characters more"
