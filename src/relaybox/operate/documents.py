"""The admin's values as JSON documents: one shape for the command and for the HTTP API.

The API hides secrets in the finished documents. The docstrings are descriptions in the OpenAPI document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from types import GenericAlias
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints
from uuid import UUID

import msgspec
from msgspec import Struct, defstruct

from relaybox.core.settings import Destination
from relaybox.core.text import stored_json
from relaybox.core.values import mask_url
from relaybox.operate.action import Done
from relaybox.operate.admin import DeadLetterRow, DestinationStats, Detail, Failures, Rows, Stats
from relaybox.operate.configured import Action
from relaybox.operate.health import Health
from relaybox.operate.why import Reason, is_alive
from relaybox.stores.journal import AuditRow, Operation
from relaybox.stores.ledger import Attempt, Content, Counts, DestinationState, Entry, Page, Relay

T = TypeVar("T", bound=Struct)
Read: TypeAlias = Callable[[str | None], Any]
"""Returns the value of a stored JSON text."""

_NAMES = {"delivered": "completed", "sending": "processing"}
"""What documents call some of the states."""


def document(name: str, doc: str, base: type[Struct] = Struct, /, **fields: Any) -> type[Struct]:
    """Define ``{name}Document``; a field ``[KIND]`` is a list of that kind."""
    kinds = [
        (key, GenericAlias(list, tuple(kind)) if isinstance(kind, list) else kind)
        for key, kind in fields.items()
    ]
    return defstruct(f"{name}Document", kinds, bases=(base,), namespace={"__doc__": doc}, kw_only=True)


def _like(kind: type, *without: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a class without some of them; ``more`` adds or overrides fields."""
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if name not in ("seen_at", *without)} | more


def _entry() -> dict[str, Any]:
    fields = list(_like(Entry).items())
    at = [name for name, _ in fields].index("status") + 1
    return dict([*fields[:at], ("state", str), *fields[at:]])


CountsDocument = document(
    "Counts",
    "How many deliveries are where; those named in ``capped`` are at least so many.",
    **dict.fromkeys(("pending", "processing", "completed", "failed", "due", "scheduled", "parked"), int),
    oldest_pending=datetime | None,
    oldest_pending_seconds=float | None,
    capped=[str],
)
PauseDocument = document(
    "Pause", "A pause.", at=datetime | None, until=datetime | None, by=str | None, reason=str | None
)
CircuitDocument = document(
    "Circuit",
    "A circuit.",
    state=Literal["closed", "open", "half_open"],
    until=datetime | None,
    reason=str | None,
)
DestinationDocument = document(
    "Destination",
    "A destination: its deliveries, what holds it up, and its settings where it is configured.",
    CountsDocument,
    name=str,
    configured=bool,
    handed_over=bool,
    sink=str | None,
    ordered=bool | None,
    max_attempts=int | None,
    dead_letter=str | None,
    retrying=str | None,
    paused=PauseDocument | None,
    circuit=CircuitDocument,
)
RelayDocument = document("Relay", "A relay's last sign of life.", **_like(Relay, alive=bool))
StatsDocument = document(
    "Stats",
    "Where everything is.",
    CountsDocument,
    destinations=[DestinationDocument],
    relays=[RelayDocument],
)

EventDocument = document("Event", "A delivery: one event for one destination.", **_entry())
DetailDocument = document(
    "Detail",
    "A delivery with what it carries, redacted; of a binary payload, its size.",
    EventDocument,
    payload=Any,
    payload_encoding=str | None,
    payload_size=int | None,
    headers=Any,
    failed_attempts=[Attempt],
)


class ReasonDocument(Struct, kw_only=True):
    """Why a delivery is where it is."""

    id: UUID
    event_id: UUID
    destination: str
    state: str
    why: str
    text: str
    until: datetime | None
    behind: ReasonDocument | None


DeadLetterDocument = document(
    "DeadLetter",
    "A delivery that failed elsewhere, where, and why.",
    EventDocument,
    origin=str | None,
    reason=str | None,
)

PAST: Mapping[Action, str] = {
    "retry": "retried",
    "replay": "replayed",
    "discard": "discarded",
    "move": "moved",
}
"""The field of each action's document that counts deliveries."""
DoneDocument = document(
    "Done",
    "What an action did; with ``dry_run``, would have done: at least so many where ``capped``. "
    "``skipped`` ones were not in a state for it; of ``unknown`` ids there is nothing.",
    skipped=int,
    unknown=[UUID],
    dry_run=bool,
    capped=bool,
)
DONE: Mapping[Action, type[Struct]] = {
    action: document(past.capitalize(), f"What a {action} did.", DoneDocument, **{past: int})
    for action, past in PAST.items()
}
OperationDocument = document(
    "Operation", "A bulk action in the background: how far it is.", **_like(Operation, details=Any)
)


def to_json(document: Any, **layout: Any) -> str:
    """Return a document, or a value that has one, as JSON with times in UTC."""
    plain = msgspec.to_builtins(document, str_keys=True, builtin_types=(datetime,), enc_hook=str)
    return json.dumps(plain, default=_in_utc, **layout)


def _in_utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def counted(counts: Counts, *states: str) -> str:
    """Return how many are in these states together, with a plus if there may be more."""
    total = sum(getattr(counts, state) for state in states)
    return f"{total:,}{'+' if counts.capped.intersection(states) else ''}"


def place_of(sink: str) -> str:
    """Return the scheme and host of a sink; the rest of its address may be secret."""
    return re.sub(r"(//[^/]*).*", r"\1", mask_url(sink).partition("?")[0], flags=re.DOTALL)


def parsed(text: str | None) -> Any:
    """Return the value of a stored JSON text, or the text if it is not JSON."""
    try:
        return None if text is None else stored_json(text)
    except (ValueError, RecursionError):
        return text


def stats(found: Stats, configured: Mapping[str, Destination]) -> Struct:
    """Return where everything is."""
    rows = [destination(one, configured.get(one.name)) for one in found.destinations]
    return StatsDocument(**_counts(found.total), destinations=rows, relays=relays(found))


def relays(found: Stats) -> list[Struct]:
    """Return the relays that were seen last."""
    return [made(RelayDocument, one, alive=is_alive(one)) for one in found.relays]


def destination(one: DestinationStats, configured: Destination | None) -> Struct:
    """Return a destination; of its settings, nothing that may be secret."""
    settings = {name: getattr(configured, name, None) for name in ("ordered", "max_attempts", "dead_letter")}
    return made(
        DestinationDocument,
        one,
        **_counts(one.counts),
        **settings,
        sink=None if configured is None else place_of(configured.sink),
        retrying=one.counts.retrying,
        paused=_pause(one.place) if one.place and one.place.paused else None,
        circuit=_circuit(one.place),
    )


def _pause(place: DestinationState) -> Struct:
    about = {"at": place.paused_at, "until": place.paused_until, "by": place.paused_by}
    return PauseDocument(**about, reason=place.pause_reason)


def _circuit(place: DestinationState | None) -> Struct:
    if place is None:
        return CircuitDocument(state="closed", until=None, reason=None)
    return CircuitDocument(state=place.circuit, until=place.circuit_until, reason=place.circuit_reason)


def _counts(counts: Counts) -> dict[str, Any]:
    """Return the counts; ``pending`` is all that waits, and ``capped`` names those that may be higher."""
    waiting = {"due": counts.due, "scheduled": counts.scheduled, "parked": counts.parked}
    capped = {_NAMES.get(state, state) for state in counts.capped}
    return {
        "pending": sum(waiting.values()),
        "processing": counts.sending,
        "completed": counts.delivered,
        "failed": counts.failed,
        **waiting,
        "oldest_pending": counts.oldest_pending,
        "oldest_pending_seconds": counts.oldest_seconds,
        "capped": sorted(capped | ({"pending"} if capped & waiting.keys() else set())),
    }


def events(page: Page, cursor: object | None) -> dict[str, Any]:
    """Return a page of deliveries."""
    return {"events": each(EventDocument, page.entries), "cursor": cursor}


def deliveries(found: Iterable[Detail], read: Read = parsed) -> dict[str, Any]:
    """Return deliveries with payload, headers and failed attempts."""
    return {"deliveries": [_detail(one, read) for one in found]}


def _detail(found: Detail, read: Read) -> Struct:
    content = found.content or Content(None, None, None, "null")
    return made(
        DetailDocument,
        found.entry,
        payload=read(content.payload),
        payload_encoding=content.payload_encoding,
        payload_size=None if content.payload_data is None else len(content.payload_data),
        headers=read(content.headers),
        failed_attempts=found.attempts,
    )


def reasons(found: Iterable[Reason]) -> dict[str, Any]:
    """Return why each delivery is where it is."""
    return {"deliveries": list(map(_reason, found))}


def _reason(found: Reason) -> ReasonDocument:
    behind = None if found.behind is None else _reason(found.behind)
    about = {"why": found.kind, "text": found.text, "until": found.until, "behind": behind}
    return made(ReasonDocument, found.entry, **about)


def failures(found: Failures) -> dict[str, Any]:
    """Return failures in groups."""
    return {"failures": found.groups, "looked_at": found.looked_at, "capped": found.capped}


def dead_letters(found: Rows[DeadLetterRow], cursor: object | None) -> dict[str, Any]:
    """Return a page of dead letters."""
    rows = [made(DeadLetterDocument, row.entry, origin=row.origin, reason=row.reason) for row in found.rows]
    return {"dead_letters": rows, "cursor": cursor}


def done(action: Action, result: Done, *, dry_run: bool, capped: bool = False) -> Struct:
    """Return what an action did."""
    about = {"skipped": result.skipped, "unknown": result.unknown, "dry_run": dry_run, "capped": capped}
    return DONE[action](**{PAST[action]: result.affected}, **about)


def health(found: Health) -> dict[str, Any]:
    """Return whether work flows, for anybody: without what follows a colon, texts of other systems."""
    about = [{**asdict(one), "reason": one.reason.partition(":")[0]} for one in found.problems]
    return {"ready": found.ready, "problems": about}


def audits(found: Rows[AuditRow], cursor: object | None) -> dict[str, Any]:
    """Return a page of what operators did."""
    return {"audit": found.rows, "cursor": cursor}


def made(kind: type[T], value: object, **more: Any) -> T:
    """Return a document with the attributes of a value; ``more`` overrides them."""
    names = [name for name in kind.__struct_fields__ if name not in more]
    return kind(**{name: getattr(value, name) for name in names}, **more)


def each(kind: type[T], values: Iterable[object]) -> list[T]:
    """Return a document of each value."""
    return [made(kind, one) for one in values]
