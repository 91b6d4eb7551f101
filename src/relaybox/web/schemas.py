"""The types of requests, and of errors. Their docstrings are descriptions in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, TypeAlias
from uuid import UUID

from msgspec import Meta, Struct

from relaybox.stores.ledger import Choice

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


class ProblemDocument(Struct, kw_only=True, omit_defaults=True):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    parameter: str | None = None
