"""From the admin's values to the documents of the API, and from these to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.operate.admin import DestinationStats, Detail
from relaybox.operate.why import Reason, is_alive
from relaybox.stores.journal import AuditRow, Operation
from relaybox.stores.ledger import Content, Counts, Entry, Relay
from relaybox.web import schemas, show
from relaybox.web.redact import Rules, redact, redacted_text

T = TypeVar("T", bound=msgspec.Struct)


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as JSON. All of it is ASCII: stored texts may hold what UTF-8 cannot."""
    body = json.dumps(msgspec.to_builtins(document, str_keys=True), separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def made(kind: type[T], value: object, **more: Any) -> T:
    """Return a document of the attributes of the same names; ``more`` goes before."""
    names = [name for name in kind.__struct_fields__ if name not in more]
    return kind(**{name: getattr(value, name) for name in names}, **more)


def counts(of: Counts) -> dict[str, Any]:
    """Return the counts by the names of the API; ``pending`` is what waits."""
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
) -> schemas.DestinationDocument:
    """Return a destination; of its settings, nothing that may be secret."""
    place, paused, circuit = one.place, None, schemas.CircuitDocument()
    if place is not None:
        reason = scrubbed(place.circuit_reason, rules)
        circuit = schemas.CircuitDocument(state=place.circuit, until=place.circuit_until, reason=reason)
    if place is not None and place.paused:
        paused = schemas.PauseDocument(
            at=place.paused_at, until=place.paused_until, by=place.paused_by, reason=place.pause_reason
        )
    settings = {name: getattr(configured, name, None) for name in ("ordered", "max_attempts", "dead_letter")}
    return made(
        schemas.DestinationDocument,
        one,
        **counts(one.counts),
        **settings,
        sink=None if configured is None else show.place(configured.sink),
        retrying=scrubbed(one.counts.retrying, rules),
        paused=paused,
        circuit=circuit,
    )


def relay(one: Relay) -> msgspec.Struct:
    """Return a relay."""
    return made(schemas.RelayDocument, one, alive=is_alive(one))


def event(
    entry: Entry, rules: Rules, kind: type[msgspec.Struct] = schemas.EventDocument, **more: Any
) -> msgspec.Struct:
    """Return a delivery, with ``more`` about it where the document is of another kind."""
    error = scrubbed(entry.error_message, rules)
    return made(kind, entry, state=str(entry.state), error_message=error, **more)


def detail(found: Detail, rules: Rules) -> msgspec.Struct:
    """Return a delivery with what it carries, as it may be shown."""
    content = found.content or Content(None, None, None, "null")
    return event(
        found.entry,
        rules,
        schemas.DetailDocument,
        payload=redacted_text(content.payload, rules),
        payload_encoding=content.payload_encoding,
        payload_size=None if content.payload_data is None else len(content.payload_data),
        headers=redacted_text(content.headers, rules),
        failed_attempts=[
            replace(one, error_message=rules.scrub(one.error_message)) for one in found.attempts
        ],
    )


def reason(found: Reason, rules: Rules) -> schemas.ReasonDocument:
    """Return why a delivery is where it is."""
    return made(
        schemas.ReasonDocument,
        found.entry,
        state=str(found.entry.state),
        why=found.kind,
        text=rules.scrub(found.text),
        until=found.until,
        behind=None if found.behind is None else reason(found.behind, rules),
    )


def operation(one: Operation, rules: Rules) -> msgspec.Struct:
    """Return a bulk action."""
    error = scrubbed(one.error, rules)
    return made(schemas.OperationDocument, one, details=details(one, rules), error=error)


def details(of: Operation | AuditRow, rules: Rules) -> Any:
    """Return what an action was about, as JSON has it."""
    return redact(json.loads(json.dumps(dict(of.details), default=str)), rules)


def scrubbed(text: str | None, rules: Rules) -> str | None:
    """Return a text that others wrote, as it may be shown."""
    return None if text is None else rules.scrub(text)
