"""From values to the documents of the API, and from these to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.operate.admin import DeadLetterRow, DestinationStats, Detail, Stats
from relaybox.operate.why import Reason, is_alive
from relaybox.stores.journal import Operation
from relaybox.stores.ledger import Counts, Entry, Place, Relay
from relaybox.web import documents, show
from relaybox.web.redact import Rules, redact, redacted_text

T = TypeVar("T", bound=msgspec.Struct)


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A document as JSON. All of it is ASCII: stored texts may hold what UTF-8 cannot."""
    body = json.dumps(msgspec.to_builtins(document, str_keys=True), separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def made(kind: type[T], value: object, **more: Any) -> T:
    """A document of the attributes of the same names; ``more`` goes before."""
    names = [name for name in kind.__struct_fields__ if name not in more]
    return kind(**{name: getattr(value, name) for name in names}, **more)


def stats(found: Stats, configured: Mapping[str, Destination], rules: Rules) -> documents.StatsDocument:
    """Where everything is."""
    return documents.StatsDocument(
        **counts(found.total),
        destinations=[destination(one, configured.get(one.name), rules) for one in found.destinations],
        relays=[relay(one) for one in found.relays],
    )


def counts(of: Counts) -> dict[str, Any]:
    """``pending`` is what waits."""
    waiting = {"due": of.due, "scheduled": of.scheduled, "parked": of.parked}
    capped = {{"delivered": "completed", "sending": "processing"}.get(name, name) for name in of.capped}
    return {
        "pending": sum(waiting.values()),
        "processing": of.sending,
        "completed": of.delivered,
        "failed": of.failed,
        **waiting,
        "oldest_pending": of.oldest_pending,
        "oldest_pending_seconds": of.oldest_seconds,
        "capped": sorted(capped | ({"pending"} if capped & waiting.keys() else set())),
    }


def destination(
    one: DestinationStats, configured: Destination | None, rules: Rules
) -> documents.DestinationDocument:
    """A destination; of its settings, nothing that may be secret."""
    place = one.place
    return documents.DestinationDocument(
        **counts(one.counts),
        name=one.name,
        configured=one.configured,
        handed_over=one.handed_over,
        sink=None if configured is None else show.place(configured.sink),
        ordered=None if configured is None else configured.ordered,
        max_attempts=None if configured is None else configured.max_attempts,
        dead_letter=None if configured is None else configured.dead_letter,
        retrying=scrubbed(one.counts.retrying, rules),
        paused=_pause(place) if place is not None and place.paused else None,
        circuit=_circuit(place, rules) if place is not None else documents.CircuitDocument(),
    )


def _pause(place: Place) -> documents.PauseDocument:
    return documents.PauseDocument(
        at=place.paused_at, until=place.paused_until, by=place.paused_by, reason=place.pause_reason
    )


def _circuit(place: Place, rules: Rules) -> documents.CircuitDocument:
    return documents.CircuitDocument(
        state=place.circuit, until=place.circuit_until, reason=scrubbed(place.circuit_reason, rules)
    )


def relay(one: Relay) -> documents.RelayDocument:
    """A relay."""
    return made(documents.RelayDocument, one, alive=is_alive(one))


def event(entry: Entry, rules: Rules) -> documents.EventDocument:
    """A delivery."""
    return made(documents.EventDocument, entry, **_about(entry, rules))


def dead_letter(row: DeadLetterRow, rules: Rules) -> documents.DeadLetterDocument:
    """A delivery that failed elsewhere."""
    about = {"origin": row.origin, "reason": scrubbed(row.reason, rules), **_about(row.entry, rules)}
    return made(documents.DeadLetterDocument, row.entry, **about)


def _about(entry: Entry, rules: Rules) -> dict[str, Any]:
    return {"state": str(entry.state), "error_message": scrubbed(entry.error_message, rules)}


def detail(found: Detail, rules: Rules) -> documents.DetailDocument:
    """A delivery with what it carries, as it may be shown."""
    content = found.content
    data = None if content is None else content.payload_data
    return made(
        documents.DetailDocument,
        found.entry,
        **_about(found.entry, rules),
        payload=None if content is None else redacted_text(content.payload, rules),
        payload_encoding=None if content is None else content.payload_encoding,
        payload_size=None if data is None else len(data),
        headers=None if content is None else redacted_text(content.headers, rules),
        failed_attempts=[
            made(documents.AttemptDocument, one, error_message=rules.scrub(one.error_message))
            for one in found.attempts
        ],
    )


def reason(found: Reason, rules: Rules) -> documents.ReasonDocument:
    """Why a delivery is where it is."""
    return made(
        documents.ReasonDocument,
        found.entry,
        state=str(found.entry.state),
        why=found.kind,
        text=rules.scrub(found.text),
        until=found.until,
        behind=None if found.behind is None else reason(found.behind, rules),
    )


def operation(one: Operation, rules: Rules) -> documents.OperationDocument:
    """A bulk action."""
    about = {"details": details(one.details, rules), "error": scrubbed(one.error, rules)}
    return made(documents.OperationDocument, one, **about)


def details(given: Mapping[str, Any], rules: Rules) -> Any:
    """What an action was about, as JSON has it."""
    return redact(json.loads(json.dumps(dict(given), default=str)), rules)


def scrubbed(text: str | None, rules: Rules) -> str | None:
    """A text that others wrote, as it may be shown."""
    return None if text is None else rules.scrub(text)
