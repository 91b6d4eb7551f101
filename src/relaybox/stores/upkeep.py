"""The contract of upkeep: heartbeats, the election of one leader, and what the leader keeps in order.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar
from uuid import UUID

Place = TypeVar("Place")
Turn: TypeAlias = tuple[datetime, int]
"""A row's place in the order of what is due: when, and its position."""
History = Literal["inbox", "stats", "audit"]
"""The tables that are pruned by age alone."""


OnFailed = Literal["block", "skip"]

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


class Samples(Protocol):
    """Looks at how much waits, for the charts, and keeps what it saw. Each look is one bounded query."""

    async def names(self) -> tuple[str, ...]:
        """The destinations that have pending or failed rows, configured or not."""
        ...

    async def measure(self, destination: str, cap: int) -> Sample:
        """How many rows are pending and failed there, no more than ``cap``, and the age of the oldest."""
        ...

    async def position(self) -> tuple[int | None, datetime]:
        """The newest position that anybody can know of, and the database's time."""
        ...

    async def keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> int | None:
        """Write the samples of a minute in place of those that are there; how many it were."""
        ...

    async def prune(self, term: int, what: Sampled, age: float, limit: int) -> int | None:
        """Remove what is more than ``age`` seconds old; how many rows it were."""
        ...


class Upkeep(Protocol):
    """Keeps the tables in order. See the module's text for what it promises."""

    async def beat(self, member: Member, live: float, *, joins: bool = True) -> Beat:
        """Be seen, and read who was seen within ``live`` seconds; one that ``joins`` commits in between.

        Members that were not seen for a day are forgotten.
        """
        ...

    async def leave(self, name: str) -> None:
        """Be no longer a member."""
        ...

    async def lead(self, name: str, seconds: float) -> int | None:
        """Lead for so long from now, or go on leading; the term, or None while another member leads."""
        ...

    async def current_term(self) -> int | None:
        """The term under which some member leads now."""
        ...

    async def resign(self, name: str) -> None:
        """Lead no longer, if this member does."""
        ...

    async def said(self) -> tuple[Said, ...]:
        """What relays said of destinations, in the order of their names."""
        ...

    async def known(self) -> dict[str, frozenset[str]]:
        """By relay the destinations of which it said something."""
        ...

    async def say(self, relay: str, settings: Mapping[str, Setting], outdated: Sequence[Said]) -> None:
        """Say so of destinations, all at once; forget what is outdated.

        Not forgotten is what was said again meanwhile, or by a relay that is a member.
        """
        ...

    async def fall_silent(self, relay: str) -> None:
        """Say it no longer: it counts as said long ago, and is not forgotten."""
        ...

    async def kept(self) -> tuple[str, ...]:
        """The destinations that may have delivered rows, configured or not."""
        ...

    async def prune_delivered(
        self, term: int, destination: str, age: float, after: datetime | None, limit: int
    ) -> Slice[datetime] | None:
        """Remove rows that were delivered more than ``age`` seconds ago, in the order of their delivery."""
        ...

    async def prune_discarded(
        self, term: int, age: Callable[[str], float], after: UUID | None, limit: int
    ) -> Slice[UUID] | None:
        """Look at the next ``limit`` rows of all, and remove those discarded longer ago than their age."""
        ...

    async def prune_orphans(self, term: int, after: UUID | None, limit: int) -> Slice[UUID] | None:
        """Look at the next ``limit`` records of attempts, and remove those whose delivery is gone."""
        ...

    async def prune_keys(
        self, term: int, age: float, after: datetime | None, limit: int
    ) -> Slice[datetime] | None:
        """Look at the next ``limit`` idempotency keys, and remove those whose event is not open.

        Looked at are those that are more than ``age`` seconds old, and all rows of whose event were final
        for so long. The others are as old again as their event's last row that is final, or new.
        """
        ...

    async def prune_history(self, term: int, history: History, age: float, limit: int) -> int | None:
        """Remove what is more than ``age`` seconds old; how many rows it were."""
        ...

    async def sweep(self, destination: str, block: bool, after: str | None, limit: int) -> Slice[str]:
        """Look at the next ``limit`` keys, and make those of their heads due that are parked.

        Any relay may do so at any time: it repeats, under their locks, what settles and operators do.
        """
        ...

    async def unpark(self, destination: str, limit: int) -> int:
        """Make parked rows due, whatever their keys: the destination is not ordered. Return how many."""
        ...

    async def route(self, term: int, router: Router, after: Turn | None, limit: int) -> Slice[Turn] | None:
        """Look at the next ``limit`` unrouted events, and give those to their destinations that are taken.

        They arrive there in the order of their positions. Where somebody has locked one of them it raises
        and routes none of its batch: to step over it would let the next of its key get ahead.
        """
        ...

    async def record(self, minutes: Sequence[Minute]) -> None:
        """Write what was counted, in place of what the same relay wrote for the same minute."""
        ...
