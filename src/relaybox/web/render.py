"""From the admin's values to the documents of the API, and from these to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.operate.admin import DestinationStats, Detail
from relaybox.operate.why import Reason
from relaybox.stores.ledger import Content, Counts
from relaybox.web import schemas, show
from relaybox.web.redact import Rules, redact, redacted_text

T = TypeVar("T", bound=msgspec.Struct)

SCRUBBED = ("error_message", "error", "message", "reason", "retrying", "text")
"""Fields that hold what others wrote."""


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as JSON. All of it is ASCII: stored texts may hold what UTF-8 cannot."""
    body = json.dumps(msgspec.to_builtins(document, str_keys=True), separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), "application/json")


def made(kind: type[T], value: object, rules: Rules, **more: Any) -> T:
    """Return a document of the attributes of the same names, as they may be shown; ``more`` goes before."""
    found = {name: more[name] if name in more else getattr(value, name) for name in kind.__struct_fields__}
    for name in SCRUBBED:
        if found.get(name) is not None:
            found[name] = rules.scrub(found[name])
    if "details" in found:
        # As JSON has it.
        found["details"] = redact(json.loads(json.dumps(dict(found["details"]), default=str)), rules)
    return kind(**found)


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
        reason = place.circuit_reason and rules.scrub(place.circuit_reason)
        circuit = schemas.CircuitDocument(state=place.circuit, until=place.circuit_until, reason=reason)
    if place is not None and place.paused:
        paused = schemas.PauseDocument(
            at=place.paused_at, until=place.paused_until, by=place.paused_by, reason=place.pause_reason
        )
    settings = {name: getattr(configured, name, None) for name in ("ordered", "max_attempts", "dead_letter")}
    return made(
        schemas.DestinationDocument,
        one,
        rules,
        **counts(one.counts),
        **settings,
        sink=None if configured is None else show.place(configured.sink),
        retrying=one.counts.retrying,
        paused=paused,
        circuit=circuit,
    )


def detail(found: Detail, rules: Rules) -> msgspec.Struct:
    """Return a delivery with what it carries, as it may be shown."""
    content = found.content or Content(None, None, None, "null")
    return made(
        schemas.DetailDocument,
        found.entry,
        rules,
        payload=redacted_text(content.payload, rules),
        payload_encoding=content.payload_encoding,
        payload_size=None if content.payload_data is None else len(content.payload_data),
        headers=redacted_text(content.headers, rules),
        failed_attempts=[made(schemas.AttemptDocument, one, rules) for one in found.attempts],
    )


def reason(found: Reason, rules: Rules) -> schemas.ReasonDocument:
    """Return why a delivery is where it is."""
    return made(
        schemas.ReasonDocument,
        found.entry,
        rules,
        why=found.kind,
        text=found.text,
        until=found.until,
        behind=None if found.behind is None else reason(found.behind, rules),
    )
