"""The values of upkeep, and its contract: heartbeats, an election, and what the leader keeps in order.

The database's clock decides who is alive, who leads and what is old; clocks of hosts do not matter.

- A member's ``name`` stands for one start of one process; no other start ever uses it.
- A term is issued once, to one member, and terms only grow. What is led names its term: in the same
  transaction the term is checked and held, and where it is over nothing is done and ``None`` comes back.
- Whatever is removed or made due is a batch of at most ``limit`` rows, found by an index, in one short
  transaction that steps over rows which somebody else has locked. Pending and failed rows are never removed.
- An event that a route takes leaves its unrouted row for one row at each of its destinations, in one
  transaction: it is everywhere or nowhere, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar
from uuid import UUID

from relaybox.stores.store import OnFailed

Place = TypeVar("Place")
Turn: TypeAlias = tuple[datetime, int]
"""A row's place in the order of what is due: when, and its position."""
History = Literal["inbox", "stats", "audit"]
"""The tables that are pruned by age alone."""
Sampled = Literal["sample", "operation"]
"""The tables of the second version, which are pruned apart: a relay works on the first one too."""


@dataclass(frozen=True, slots=True)
class Member:
    """A relay, as the others see it."""

    name: str
    host: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat learns: the members alive, sorted, itself among them, and the database's time."""

    alive: tuple[str, ...]
    now: datetime


@dataclass(frozen=True, slots=True)
class Setting:
    """What upkeep needs to know of a destination."""

    retention: float
    ordered: bool
    on_failed: OnFailed


@dataclass(frozen=True, slots=True)
class Said:
    """What a relay said of a destination, and how many seconds ago it last did."""

    destination: str
    setting: Setting
    relay: str
    age: float


@dataclass(frozen=True, slots=True)
class Slice(Generic[Place]):
    """One step of a walk through rows: how many were changed; where to go on, None: at the end."""

    changed: int
    after: Place | None


@dataclass(frozen=True, slots=True)
class Minute:
    """What one relay settled for one destination in one minute. ``lag`` counts by bucket (``lag.py``)."""

    minute: datetime
    destination: str
    relay: str
    delivered: int
    retried: int
    failed: int
    lag: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that no route took, as it is stored. ``scheduled``: it is not to be delivered yet."""

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
    """Where an event goes, with what differs from destination to destination.

    ``final``: its row is delivered from the start, because no relay does it.
    """

    destination: str
    ordering_key: str | None
    max_attempts: int
    final: bool = False


class Router(Protocol):
    """Knows the routes."""

    def takes(self, event_type: str) -> bool:
        """Whether any route takes such events: of the others no more than their type is read."""
        ...

    def targets(self, event: Waiting) -> Sequence[Target]:
        """Where the event goes now, in the order of the routes; nowhere: it goes on waiting."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """What waits at a destination; the destination '' stands for all of them, with the newest position."""

    destination: str
    pending: int
    failed: int
    oldest_seconds: float | None
    position: int | None = None
