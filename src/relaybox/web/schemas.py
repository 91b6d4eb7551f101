"""The types of requests and responses. Their docstrings are descriptions in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints
from uuid import UUID

from msgspec import Meta, Struct, defstruct

from relaybox.operate.admin_actions import Action
from relaybox.operate.health import Problem
from relaybox.operate.history import FailureGroup, Point
from relaybox.stores.journal import AuditRow, Operation
from relaybox.stores.ledger import Attempt, Choice, Entry, Relay

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL cannot store NUL in text, so no row can match one."""

Text: TypeAlias = Annotated[str, Meta(max_length=255, pattern=NO_NUL)]
Long: TypeAlias = Annotated[str, Meta(max_length=1000, pattern=NO_NUL)]
Moment: TypeAlias = Annotated[
    str,
    Meta(
        max_length=64,
        pattern=r"^[0-9]",
        description="A time such as 2026-01-31T12:00:00Z (UTC where no zone is given), or a duration such "
        "as 30m, 1h or 7d: so long ago, for the end of a pause from now.",
    ),
]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=500)]
Cursor: TypeAlias = Annotated[
    str, Meta(max_length=200, description="Of the page before, for the same query.")
]
Rate: TypeAlias = Annotated[float, Meta(ge=0.1, le=1_000_000, description="Rows a second.")]
Ids: TypeAlias = Annotated[
    list[UUID], Meta(min_length=1, max_length=100, description="Of events, or of deliveries.")
]


class Asked(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client may say; anything else is refused."""


class Nothing(Asked):
    """No parameters, or an empty object."""


class Criteria(Asked):
    """Which deliveries are meant: those that everything given here is true of."""

    status: Choice | None = None
    destination: Text | None = None
    event_type: Text | None = None
    aggregate_type: Text | None = None
    aggregate_id: Text | None = None
    ordering_key: Text | None = None
    event_id: UUID | None = None
    since: Moment | None = None
    until: Moment | None = None
    error: Long | None = None
    fingerprint: Text | None = None


class EventsQuery(Criteria):
    """A page of deliveries."""

    limit: Limit = 50
    cursor: Cursor | None = None


class LimitQuery(Asked):
    """A list that has no second page."""

    limit: Limit = 50


class PageQuery(LimitQuery):
    """A page of a list."""

    cursor: Cursor | None = None


class FailuresQuery(LimitQuery):
    """Failures, perhaps of one destination."""

    destination: Text | None = None


class SeriesQuery(Asked):
    """How far back charts go, and perhaps of which destination."""

    hours: Annotated[float, Meta(gt=0, le=24 * 31)] = 1.0
    destination: Text | None = None


class ActionBody(Asked):
    """Which deliveries: ``ids``, a ``filter``, or ``all``. With ids, only a filter's destination counts."""

    ids: Ids | None = None
    filter: Criteria | None = None
    all: bool = False
    dry_run: bool = False
    background: bool = False
    rate: Rate | None = None


class ReplayBody(ActionBody):
    """As well, the destination to replay to instead of their own."""

    to: Text | None = None


class MoveBody(Asked, rename={"from_": "from"}):
    """Whose deliveries go where."""

    from_: Text
    to: Text
    dry_run: bool = False
    background: bool = False
    rate: Rate | None = None


class PauseBody(Asked):
    """Why, and until when; else until somebody resumes it."""

    reason: Long = ""
    until: Moment | None = None


def _document(name: str, doc: str, base: type[Struct] = Struct, /, **fields: Any) -> type[Struct]:
    """Define ``{name}Document``; a field ``[KIND]`` is a list of that kind."""
    kinds = {
        key: GenericAlias(list, tuple(kind)) if isinstance(kind, list) else kind
        for key, kind in fields.items()
    }
    return defstruct(
        f"{name}Document", list(kinds.items()), bases=(base,), namespace={"__doc__": doc}, kw_only=True
    )


def _like(kind: type, *without: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a class without some of them; ``more`` adds or overrides fields."""
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if name not in ("seen_at", *without)} | more


def _entry() -> dict[str, Any]:
    fields = list(_like(Entry).items())
    at = [name for name, _ in fields].index("status") + 1
    return dict([*fields[:at], ("state", str), *fields[at:]])


class CountsDocument(Struct, kw_only=True):
    """How many deliveries are where; those named in ``capped`` are at least so many."""

    pending: int
    processing: int
    completed: int
    failed: int
    due: int
    scheduled: int
    parked: int
    oldest_pending: datetime | None
    oldest_pending_seconds: float | None
    capped: list[str]


class PauseDocument(Struct, kw_only=True):
    """A pause."""

    at: datetime | None
    until: datetime | None
    by: str | None
    reason: str | None


class CircuitDocument(Struct, kw_only=True):
    """A circuit."""

    state: Literal["closed", "open", "half_open"] = "closed"
    until: datetime | None = None
    reason: str | None = None


class DestinationDocument(CountsDocument, kw_only=True):
    """A destination: its deliveries, what holds it up, and its settings where it is configured."""

    name: str
    configured: bool
    handed_over: bool
    sink: str | None
    ordered: bool | None
    max_attempts: int | None
    dead_letter: str | None
    retrying: str | None
    paused: PauseDocument | None
    circuit: CircuitDocument


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


class DoneDocument(Struct, kw_only=True):
    """What an action did; with ``dry_run``, would have done: at least so many where ``capped``.

    ``skipped`` ones were not in a state for it; of ``unknown`` ids there is nothing.
    """

    skipped: int
    unknown: list[UUID]
    dry_run: bool
    capped: bool


class ProblemDocument(Struct, kw_only=True):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    parameter: str | None = None


RelayDocument = _document("Relay", "A relay's last sign of life.", **_like(Relay, alive=bool))
RelaysDocument = _document("Relays", "The relays that were seen last.", relays=[RelayDocument])
DestinationsDocument = _document(
    "Destinations", "Every destination that is configured, or has rows.", destinations=[DestinationDocument]
)
StatsDocument = _document(
    "Stats",
    "Where everything is.",
    CountsDocument,
    destinations=[DestinationDocument],
    relays=[RelayDocument],
)

EventDocument = _document("Event", "A delivery: one event for one destination.", **_entry())
EventsDocument = _document(
    "Events",
    "Deliveries, newest first. A short page that has a cursor is worth going on from.",
    events=[EventDocument],
    cursor=str | None,
)
AttemptDocument = _document("Attempt", "An attempt that failed.", **_like(Attempt))
DetailDocument = _document(
    "Detail",
    "A delivery with what it carries, redacted; of a binary payload, its size.",
    EventDocument,
    payload=Any,
    payload_encoding=str | None,
    payload_size=int | None,
    headers=Any,
    failed_attempts=[AttemptDocument],
)
DeliveriesDocument = _document(
    "Deliveries",
    "The delivery of an id, or every delivery of the event of that id.",
    deliveries=[DetailDocument],
)
ReasonsDocument = _document(
    "Reasons", "Why each delivery of an id is where it is.", deliveries=[ReasonDocument]
)
DeadLetterDocument = _document(
    "DeadLetter",
    "A delivery that failed elsewhere, where, and why.",
    EventDocument,
    origin=str | None,
    reason=str | None,
)
DeadLettersDocument = _document(
    "DeadLetters", "Dead letters, newest first.", dead_letters=[DeadLetterDocument], cursor=str | None
)
FailureDocument = _document(
    "Failure", "Failed deliveries whose errors are alike.", **_like(FailureGroup, "error")
)
FailuresDocument = _document(
    "Failures",
    "Failures in groups; ``capped``: of the newest ``looked_at`` only.",
    failures=[FailureDocument],
    looked_at=int,
    capped=bool,
)

PAST: Mapping[Action, str] = {
    "retry": "retried",
    "replay": "replayed",
    "discard": "discarded",
    "move": "moved",
}
"""The field of each action's response that counts deliveries."""
DONE: Mapping[Action, type[Struct]] = {
    action: _document(past.capitalize(), f"What a {action} did.", DoneDocument, **{past: int})
    for action, past in PAST.items()
}
OperationDocument = _document(
    "Operation", "A bulk action in the background: how far it is.", **_like(Operation, details=Any)
)
OperationsDocument = _document("Operations", "Bulk actions, newest first.", operations=[OperationDocument])
CancelledDocument = _document("Cancelled", "Whether there was anything to cancel.", cancelled=bool)

PausedDocument = _document(
    "Paused",
    "A destination that is paused now.",
    destination=str,
    paused=bool,
    reason=str,
    until=datetime | None,
)
ResumedDocument = _document("Resumed", "Whether there was anything to resume.", destination=str, resumed=bool)
TestedDocument = _document(
    "Tested", "The event that was written to test a destination.", destination=str, event_id=UUID
)

AuditDocument = _document("Audit", "Who did what.", **_like(AuditRow, details=Any))
AuditsDocument = _document(
    "Audits", "What operators did, newest first.", audit=[AuditDocument], cursor=str | None
)
PointDocument = _document(
    "Point", "One step of a chart: events a second, counts, and seconds.", **_like(Point)
)
SeriesDocument = _document(
    "Series", "What charts are drawn from, oldest first.", step_seconds=float, points=[PointDocument]
)
TroubleDocument = _document("Trouble", "A reason for which work does not flow.", **_like(Problem))
HealthDocument = _document("Health", "Whether work flows.", ready=bool, problems=[TroubleDocument])
AliveDocument = _document("Alive", "That this process answers.", alive=bool)
