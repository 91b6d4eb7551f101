"""The fake's tables of what relays say of destinations and of idempotency keys, and what may be pruned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import msgspec

from relaybox.core.settings import Destination
from relaybox.errors import NoTables
from relaybox.stores.sql.upkeep.agreement import SqlReports
from relaybox.stores.upkeep import Report, Setting
from tests.simulation.database import OPEN, Database, Row, Transaction

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

Rows = list[Sequence[Any]]
WINDOW, PROMPT = 1.0, 0.5  # Seconds that keys are kept beyond their events, and that need not be noted


class Key(NamedTuple):
    """An idempotency key."""

    event_id: UUID
    created_at: float


@dataclass(frozen=True)
class Differs:
    """How some of the relays know a destination: with another retention, or not at all.

    ``silent``: the others are of the last release, which says nothing of what it knows.
    """

    name: str
    retention: float | None
    silent: bool


def draw_difference(plan: Plan) -> Differs | None:
    """Draw from a stream of its own, so that what else a seed draws stays the same."""
    luck = Random(f"different settings {plan.seed}")
    if plan.relays == 1 or luck.random() > 0.1:
        return None
    one = luck.choice([one for one in plan.destinations if one.name != "dead"])
    differs = Differs(one.name, luck.choice((None, 0.5, 2.0)), luck.random() < 0.3)
    # The last release also counts the relays that lack a destination.
    return replace(differs, silent=False) if differs.retention is None and one.concurrency < 8 else differs


def draw_keyed(plan: Plan) -> bool:
    """True if every event has an idempotency key of its own."""
    return Random(f"keyed {plan.seed}").random() < 0.1


class Agreed(SqlReports):
    """Reports of relays that all have the same settings, and need not say so."""

    async def read(self) -> tuple[Report, ...]:
        raise NoTables("nobody says anything")

    async def write(self, *_: Any) -> None:
        await self.read()

    async def outdate(self, relay: str) -> None:
        """Do nothing."""


def known_to(differs: Differs | None, destinations: list[Destination]) -> list[Destination]:
    """Return the destinations that a relay knows which differs."""
    if differs is None:
        return destinations
    others = [one for one in destinations if one.name != differs.name]
    if differs.retention is None:
        return others
    changed = [replace(one, retention=differs.retention) for one in destinations if one.name == differs.name]
    return [*changed, *others]


class UpkeepTables:
    """The statements of both tables."""

    database: Database
    learned: dict[str, dict[str, float]]
    """By relay: the longest retention of each destination, as it was when that relay last asked."""

    def do_upkeep__said(self, transaction: Transaction) -> Rows:
        said = [
            (*key[1:], *value)
            for key, value in (self.database.others | transaction.others).items()
            if isinstance(key, tuple) and key[0] == "setting" and value is not None
        ]
        learned: dict[str, float] = {}
        for name, _, setting, _ in said:
            retention = msgspec.json.decode(setting, type=Setting).retention
            learned[name] = max(retention, learned.get(name, 0.0))
        self.learned[getattr(transaction.node, "name", "")] = learned
        return sorted(said)

    def do_upkeep__known(self, transaction: Transaction) -> Rows:
        said = (self.database.others | transaction.others).items()
        return [
            (key[2], key[1])
            for key, value in said
            if isinstance(key, tuple) and key[0] == "setting" and value is not None
        ]

    def do_upkeep__say(self, transaction: Transaction, destination: str, me: str, setting: str) -> Rows:
        self.database.lock(transaction, ("setting", destination, me))
        transaction.others["setting", destination, me] = setting, self.database.now()
        return []

    def do_upkeep__unsay(
        self, transaction: Transaction, destination: str, relay: str, seconds: float
    ) -> Rows:
        key, before = ("setting", destination, relay), self.database.now() + seconds
        said = self.database.other(transaction, key)
        member = self.database.other(transaction, ("member", relay))
        if said is not None and said[1] <= before and member is None:
            self.database.lock(transaction, key)
            transaction.others[key] = None
        return []

    def do_upkeep__fall_silent(self, transaction: Transaction, me: str, at: float) -> Rows:
        for key, value in list(self.database.others.items()):
            if isinstance(key, tuple) and key[0] == "setting" and key[2] == me and value is not None:
                self.database.lock(transaction, key)
                transaction.others[key] = value[0], at
        return []

    # Idempotency keys.

    def do_upkeep__keys(
        self, transaction: Transaction, seconds: float, since: float, limit: int, term: int
    ) -> Rows:
        if not self._led(transaction, term):  # type: ignore[attr-defined]
            return [[0, 0, None]]
        found = self.do_upkeep__find_keys(transaction, seconds, since, limit)
        gone = [row for row in found if row[3] is None or row[3] < row[4]]
        for row in found:
            if row in gone:
                self.do_upkeep__forget_keys(transaction, row[0], [row[1]])
            else:
                self.do_upkeep__keep_key(transaction, row[0], row[1], row[3])
        return [[len(gone), len(found), found[-1][2] if found else None]]

    def do_upkeep__find_keys(
        self, transaction: Transaction, seconds: float, since: float, limit: int
    ) -> Rows:
        cut = self.database.now() + seconds
        old = sorted(
            (key.created_at, name)
            for name, key in self._keys()
            # A moment that was handed out and comes back is rounded to microseconds, as databases keep it.
            if since <= round(key.created_at, 6) < cut
            and self.database.lockable(transaction, ("idempotency", name))
        )[:limit]
        found: Rows = []
        for created_at, name in old:
            key = self.database.others["idempotency", name]
            found.append(("thing.changed", name, created_at, self._final_at(transaction, key.event_id), cut))
        return found

    def _final_at(self, transaction: Transaction, event_id: UUID) -> float | None:
        rows = [row for row in self.database.rows.values() if row.emitted.event_id == event_id]
        now = self.database.now()
        return max((now if row.status in OPEN else row.updated_at for row in rows), default=None)

    def do_upkeep__keep_key(self, transaction: Transaction, event_type: str, key: str, at: float) -> Rows:
        known = self.database.other(transaction, ("idempotency", key))
        if known is not None and known.created_at < at:
            self.database.lock(transaction, ("idempotency", key))
            transaction.others["idempotency", key] = known._replace(created_at=at)
        return []

    def do_upkeep__forget_keys(self, transaction: Transaction, of: str, keys: Sequence[str]) -> Rows:
        for key in keys:
            transaction.others["idempotency", key] = None
        return []

    def keep_keys_of(self, transaction: Transaction, ids: Sequence[str]) -> None:
        """Note at the keys of removed rows when the rows became final, as the deleting statement does."""
        for id_ in ids:
            row = self.database.rows[id_]
            if row.updated_at - row.emitted.created > PROMPT:
                at = row.updated_at
                self.do_upkeep__keep_key(transaction, "thing.changed", row.emitted.idempotency_key, at)

    def _keys(self) -> Iterator[tuple[str, Key]]:
        for key, value in self.database.others.items():
            if isinstance(key, tuple) and key[0] == "idempotency" and value is not None:
                yield key[1], value


class Prunings:
    """Judges what upkeep removes; ``knows`` says what retentions a relay was started with."""

    def __init__(self, server: UpkeepTables, plan: Plan, knows: Callable[[Any], Mapping[str, float]]) -> None:
        self._server = server
        self._database = server.database
        self._knows = knows
        self._final_at: dict[UUID, float] = {}
        # Where the clock is set, ages are what it says.
        self._steady = not plan.steps

    def changed(self, before: Row | None, row: Row | None, writer: Any) -> str | None:
        """Return what is wrong with the pruning of a delivered row, or None."""
        if before is None:
            return None
        if before.status in OPEN and (row is None or row.status not in OPEN):
            # As the row says, which is the moment of the statement; its commit comes later.
            at = self._database.now() if row is None else row.updated_at
            self._final_at[before.emitted.event_id] = at
        if row is not None or before.status != "delivered":
            return None
        name = before.emitted.destination
        retentions = self._knows(writer), self._server.learned.get(writer.name, {})
        known = [retention[name] for retention in retentions if name in retention]
        if not known:
            return f"was pruned by {writer.name}, which does not know its destination"
        age = self._database.now() - (before.delivered_at or 0.0)
        if self._steady and age < max(known):
            return f"was pruned {age:g} s after its delivery, though a relay wants it for {max(known):g} s"
        return None

    def forgotten(self, transaction: Transaction) -> Iterator[tuple[UUID, str]]:
        """Yield what is wrong with the keys that a transaction is about to remove."""
        for name, new in transaction.others.items():
            key = self._database.others.get(name)
            if not isinstance(name, tuple) or name[0] != "idempotency" or new is not None or key is None:
                continue
            rows = [row for row in self._database.rows.values() if row.emitted.event_id == key.event_id]
            if any(row.status in OPEN for row in rows):
                yield key.event_id, "lost its idempotency key while it was open"
            elif self._steady and self._database.now() - self._final_at.get(key.event_id, 0.0) < WINDOW:
                yield key.event_id, f"lost its idempotency key less than {WINDOW:g} s after it was final"
