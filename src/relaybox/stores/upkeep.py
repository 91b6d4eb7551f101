"""The values and contract of upkeep: heartbeats, an election, and the leader's work.

The database's clock decides who is alive, who leads and what is old.

- A member's ``name`` belongs to one start of one process, and is never reused.
- A term is issued once, to one member, and terms only grow. Each of the leader's transactions checks and
  locks its term; if the term is over, it does nothing and returns ``None``.
- Pruning and unparking work in batches of at most ``limit`` rows, found by an index. Each is one short
  transaction that skips locked rows. Pending and failed rows are never removed.
- Routing replaces an unrouted row with one row per destination, in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar
from uuid import UUID

from relaybox.stores.store import OnFailed

At = TypeVar("At")
Turn: TypeAlias = tuple[datetime, int]
"""A row's place in the order of due rows: its time and position."""
History = Literal["inbox", "stats", "audit"]
"""Tables that are pruned by age alone."""
Sampled = Literal["sample", "operation"]
"""Tables of the second version, pruned separately: a relay also works on the first version."""


@dataclass(frozen=True, slots=True)
class Member:
    """A relay, as the others see it."""

    name: str
    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The result of a heartbeat: sorted names of live members, itself included, and the database's time."""

    alive: tuple[str, ...]
    now: datetime


@dataclass(frozen=True, slots=True)
class Setting:
    """What upkeep needs to know about a destination."""

    retention: float
    ordered: bool
    on_failed: OnFailed


@dataclass(frozen=True, slots=True)
class Report:
    """What a relay reported about a destination, and how many seconds ago."""

    destination: str
    setting: Setting
    relay: str
    age: float


@dataclass(frozen=True, slots=True)
class Slice(Generic[At]):
    """One step of a walk through rows: the number changed, and where to continue (None at the end)."""

    changed: int
    after: At | None


@dataclass(slots=True)
class Minute:
    """One relay's results for one destination and minute; ``lag`` counts by bucket (see ``tally.py``)."""

    minute: datetime
    destination: str
    relay: str
    delivered: int = 0
    retried: int = 0
    failed: int = 0
    lag: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A stored event without a route; ``scheduled`` if it is not due yet."""

    event_id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str | None
    payload_data: bytes | None
    payload_encoding: str | None
    headers: str
    ordering_key: str | None
    idempotency_key: str
    max_attempts: int
    scheduled: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A destination of an event; a ``final`` row is inserted as delivered, because no relay sends it."""

    destination: str
    ordering_key: str | None
    max_attempts: int
    final: bool = False


class Router(Protocol):
    """Knows the routes."""

    def takes(self, event_type: str) -> bool:
        """True if any route takes such events; the rest of other events is not read."""
        ...

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        """Return where the event goes, in the order of the routes; if empty, the event keeps waiting."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The backlog of a destination; '' stands for all of them, with the newest position."""

    destination: str
    pending: int
    failed: int
    oldest_seconds: float | None
    position: int | None = None
