"""What ``--json`` prints: values as dicts whose keys do not change."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from relaybox.admin import Audits, DeadLetters, DestinationStats, Detail, Failures, Stats
    from relaybox.ledger import Counts, Entry, Page, Place
    from relaybox.why import Reason


def stats_document(stats: Stats) -> dict[str, Any]:
    """Where everything is."""
    return {
        **_counts(stats.total),
        "destinations": [_destination(one) for one in stats.destinations],
        "relays": [_plain(asdict(relay)) for relay in stats.relays],
    }


def page_document(page: Page) -> dict[str, Any]:
    """A page of deliveries."""
    return {"events": [entry_document(entry) for entry in page.entries], "cursor": _value(page.cursor)}


def entry_document(entry: Entry) -> dict[str, Any]:
    """A delivery."""
    return {**_plain(asdict(entry)), "state": str(entry.state)}


def detail_document(detail: Detail) -> dict[str, Any]:
    """A delivery with all that is known of it."""
    content = detail.content
    document = entry_document(detail.entry)
    if content is not None:
        data = content.payload_data
        document |= {
            "payload": None if content.payload is None else _document(content.payload),
            "payload_data": None if data is None else base64.b64encode(data).decode(),
            "payload_encoding": content.payload_encoding,
            "headers": _document(content.headers),
        }
    return {**document, "failed_attempts": [_plain(asdict(attempt)) for attempt in detail.attempts]}


def _document(text: str) -> Any:
    """The JSON; where it is none, the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def reason_document(reason: Reason) -> dict[str, Any]:
    """Why a delivery is where it is."""
    entry = reason.entry
    return {
        "id": str(entry.id),
        "event_id": str(entry.event_id),
        "destination": entry.destination,
        "state": str(entry.state),
        "why": reason.kind,
        "text": reason.text,
        "until": _value(reason.until),
        "behind": None if reason.behind is None else reason_document(reason.behind),
    }


def failures_document(failures: Failures) -> dict[str, Any]:
    """Failed deliveries by what went wrong."""
    return {
        "failures": [
            {**_plain(asdict(group)), "event_types": list(group.event_types)} for group in failures.groups
        ],
        "looked_at": failures.looked_at,
        "capped": failures.capped,
    }


def dead_letters_document(letters: DeadLetters) -> dict[str, Any]:
    """A page of dead letters."""
    rows = [{**entry_document(row.entry), "origin": row.origin, "reason": row.reason} for row in letters.rows]
    return {"dead_letters": rows, "cursor": _value(letters.cursor)}


def audits_document(audits: Audits) -> dict[str, Any]:
    """A page of what operators did."""
    return {"audits": [_plain(asdict(row)) for row in audits.rows], "cursor": audits.cursor}


def _counts(counts: Counts) -> dict[str, Any]:
    """``pending`` is what waits; those named in ``capped`` are at least so many."""
    waiting = {"due": counts.due, "scheduled": counts.scheduled, "parked": counts.parked}
    capped = {{"delivered": "completed"}.get(name, name) for name in counts.capped}
    return {
        "pending": sum(waiting.values()),
        "processing": counts.sending,
        "completed": counts.delivered,
        "failed": counts.failed,
        **waiting,
        "oldest_pending": _value(counts.oldest_pending),
        "oldest_pending_seconds": counts.oldest_seconds,
        "capped": sorted(capped | ({"pending"} if capped & waiting.keys() else set())),
    }


def _destination(one: DestinationStats) -> dict[str, Any]:
    about = {"name": one.name, "configured": one.configured, "handed_over": one.handed_over}
    return {**about, **_counts(one.counts), "retrying": one.counts.retrying, **_place(one.place)}


def _place(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"paused": None, "circuit": {"state": "closed", "until": None, "reason": None}}
    paused = {
        "at": _value(place.paused_at),
        "until": _value(place.paused_until),
        "by": place.paused_by,
        "reason": place.pause_reason,
    }
    circuit = {
        "state": place.circuit,
        "until": _value(place.circuit_until),
        "reason": place.circuit_reason,
    }
    return {"paused": paused if place.paused else None, "circuit": circuit}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
