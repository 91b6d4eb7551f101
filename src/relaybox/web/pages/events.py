"""The pages ``/events``, ``/events/{id}``, ``/failures`` and ``/dead-letters``, and their filters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.redact import HIDDEN, Rules, redacted_text
from relaybox.core.text import at, binary, cut, plural
from relaybox.core.values import parsed
from relaybox.errors import ConfigError
from relaybox.operate.admin import Detail
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Choice, Content, Entry, Filter, Page, State
from relaybox.web import read
from relaybox.web.pages.destinations import Mood
from relaybox.web.problems import Problem
from relaybox.web.schemas import Criteria
from relaybox.web.templating import error_page, page, paging

FIELDS = {name: name.replace("_", " ").capitalize() for name in Criteria.__struct_fields__} | {
    "status": "State",
    "since": "Emitted since",
    "until": "Emitted before",
    "error": "Error holds",
    "fingerprint": "Group of failures",
}
CHOICES = tuple(one for one in get_args(Choice) if one not in ("processing", "completed"))
BULK = {
    "failed": (("retry", "Retry all…"), ("discard", "Discard all…")),
    "delivered": (("replay", "Replay all…"),),
    "discarded": (("replay", "Replay all…"),),
    "pending": (("discard", "Discard all…"),),
}

LONGEST = 100_000
"""Most characters of a document to show."""

MOODS: dict[str, Mood] = {
    "delivered": "good",
    "handed_over": "good",
    "failed": "bad",
    **dict.fromkeys(("paused", "circuit_open", "circuit_half_open"), "warn"),
    **dict.fromkeys(("unrouted", "unknown_destination", "not_relayed"), "warn"),
}


class Wrong(ValueError):
    """A wrong parameter or field; the message says which, and how to fix it."""


async def events(request: Request) -> Response:
    """Show a page of deliveries, with the filter as given even if it is wrong."""
    admin = request.state.admin
    names = [name for name in await admin.names() if name]
    given, at = chosen(request.query_params), request.query_params.get("cursor")
    wrong, found, cursor = "", Page((), None), parsed(UUID, at or "")
    try:
        if at and cursor is None:
            raise Wrong("The address names no place in the list; begin with the newest again.")
        found = await admin.events(filter_of(request, given), cursor=cursor)
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


async def event(request: Request) -> Response:
    """Show an event with all its deliveries, or one delivery, by its id."""
    admin, allowed = request.state.admin, request.app.rules
    id_ = parsed(UUID, request.path_params["id"])
    details = () if id_ is None else await admin.event(id_)
    if id_ is None or not details:
        gone = "No delivery and no event has this id. Delivered ones are removed after their retention."
        return error_page(request, 404, "No such event", gone)
    reasons = {reason.entry.id: reason for reason in await admin.why(id_)}
    shown = [_shown(one, reasons.get(one.entry.id), allowed) for one in details]
    payload = _payload(details[0].content, allowed)
    return page(
        request,
        "event.html",
        event=details[0].entry,
        deliveries=shown,
        payload=payload,
        headers=shown[0]["headers"],
        redacted=HIDDEN in payload,
        spoken=", ".join(f"{one.entry.destination}: {one.entry.state}" for one in details),
    )


def _shown(one: Detail, reason: Reason | None, allowed: Rules) -> dict[str, Any]:
    return {
        "entry": one.entry,
        "why": "is where its state says" if reason is None else allowed.scrub(reason.text),
        "mood": "" if reason is None else MOODS.get(reason.kind, ""),
        "steps": list(_steps(one, reason, allowed)),
        "facts": list(_facts(one.entry)),
        "actions": list(_actions(one.entry)),
        "headers": "" if one.content is None else _document(redacted_text(one.content.headers, allowed)),
    }


@dataclass(frozen=True, slots=True)
class Step:
    """A past or future step of a delivery; ``kind`` selects its icon."""

    kind: str
    title: str
    at: datetime | None
    text: str = ""
    by: str = ""


def _steps(one: Detail, reason: Reason | None, allowed: Rules) -> Iterator[Step]:
    entry = one.entry
    yield Step("emitted", "Emitted", entry.created_at)
    for attempt in one.attempts:
        title, error = f"Attempt {attempt.attempt} failed", allowed.scrub(attempt.error_message)
        yield Step("failed", title, attempt.failed_at, error, attempt.relay)
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
        yield "Times its relay died or was stopped", str(entry.crashes)
    if entry.ordering_key is not None:
        yield "Ordering key", entry.ordering_key
    if entry.lease_owner is not None:
        yield "Last held by", entry.lease_owner
    yield "Updated", at(entry.updated_at)


def _actions(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yield the actions for a delivery; those with an ellipsis ask for confirmation."""
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
        return binary(content.payload_data, content.payload_encoding)
    return _document(redacted_text(content.payload, allowed))


def _document(value: Any) -> str:
    return cut(json.dumps(value, indent=2, ensure_ascii=False), LONGEST)


async def failures(request: Request) -> Response:
    """Show groups of failures, of one destination if the URL names it."""
    admin = request.state.admin
    chosen = request.query_params.get("destination") or None
    names = [name for name in await admin.names() if name]
    found = await admin.failures(chosen if chosen in names else None)
    spoken = f"{plural(len(found.groups), 'group')} of failures"
    return page(request, "failures.html", failures=found, names=names, chosen=chosen, spoken=spoken)


async def dead_letters(request: Request) -> Response:
    """Show deliveries at destinations that others name as ``dead_letter``."""
    admin = request.state.admin
    cursor = parsed(UUID, request.query_params.get("cursor", ""))
    found = await admin.dead_letters(cursor=cursor)
    return page(
        request,
        "dead_letters.html",
        letters=found,
        configured=any(one.dead_letter for one in (await admin.destinations()).values()),
        **paging(request, "/dead-letters", cursor, found.cursor),
    )


def chosen(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the filter's parameters that are not empty; forms also send empty ones."""
    texts = ((name, str(given.get(name, "")).strip()) for name in FIELDS)
    return {name: text for name, text in texts if text}


def filter_of(request: Request, given: Mapping[str, str]) -> Filter:
    """Return the filter; raise ``Wrong`` if a parameter is invalid."""
    try:
        return read.filter_of(msgspec.convert(given, Criteria, strict=False), request.app.rules)
    except msgspec.ValidationError as error:
        what, _, name = str(error).rpartition(" - at `$.")
        raise Wrong(f"{FIELDS.get(name.rstrip('`'), 'Filter')}: {what or error}.") from None
    except Problem as error:
        raise Wrong(error.detail) from None
