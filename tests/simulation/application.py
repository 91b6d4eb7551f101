"""The application: transactions that emit events, some at the same time, and what they committed.

The transactions of a key come one after the other: each locks the key first. Across keys they overlap, so
that commits come in another order than positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from uuid import UUID

from tests.simulation.database import Blocked, Database, Deadlock, Emitted, Row, Transaction, to_datetime
from tests.simulation.plan import EMITTING, LARGE, Plan
from tests.simulation.statements import Server
from tests.simulation.upkeep_tables import Key
from tests.simulation.world import World


class Application:
    """Emits by a plan. ``committed`` is called with the destinations of each transaction that committed."""

    def __init__(
        self, world: World, server: Server, plan: Plan, committed: Callable[[list[str]], None]
    ) -> None:
        self._world = world
        self._database: Database = server.database
        self._plan = plan
        self._committed = committed
        self._names = [destination.name for destination in plan.destinations if destination.name != "dead"]
        self._attempts = plan.destinations[0].max_attempts
        self._keyed = {destination.name: destination.ordered for destination in plan.destinations}
        self.events: list[Emitted] = []  # What was committed, in the order of commits
        self.under_way = 0

    def start(self) -> None:
        luck, number = self._world.random, 0
        while number < self._plan.events:
            size = min(luck.choice((1, 5, 20, 40)), self._plan.events - number)
            self.emit(range(number, number + size), after=luck.uniform(0.0, EMITTING))
            number += size

    def emit(self, numbers: Sequence[int], *, after: float = 0.0) -> None:
        self.under_way += 1
        self._world.after(after, self._begin, numbers)

    def _begin(self, numbers: Sequence[int]) -> None:
        luck = self._world.random
        # What comes after the plan's own events must not set one of their keys going.
        own = numbers[0] < self._plan.events
        key = f"key {luck.randrange(self._plan.keys)}" if own else "another key"
        transaction = self._database.begin(self)
        self._go_on(transaction, key, numbers)

    def _go_on(self, transaction: Transaction, key: str, numbers: Sequence[int]) -> None:
        transaction.awaiting = None
        if transaction.over:
            self._again(numbers)
            return
        try:
            if self._plan.flavour == "single":
                self._database.lock(transaction, "writer")
            self._database.lock(transaction, ("key", key))
        except Blocked as blocked:
            go_on = partial(self._world.after, 0.0, self._go_on, transaction, key, numbers)
            try:
                self._database.wait(transaction, blocked.holder, go_on)
            except Deadlock:
                self._database.rollback(transaction)
                self._again(numbers)
            return
        self._insert(transaction, key, numbers)

    def _insert(self, transaction: Transaction, key: str, numbers: Sequence[int]) -> None:
        database, luck, made = self._database, self._world.random, []
        now, names = database.now(), self._names
        moment = to_datetime(now)
        for number in numbers:
            event_id = UUID(int=(number + 1) << 64 | luck.getrandbits(32))
            if self._plan.keyed:
                transaction.others["idempotency", f"key {number}"] = Key(event_id, now)
            first = int(luck.random() * len(names))
            for index in range(len(names)) if luck.random() < 0.1 else (first,):
                name = names[index]
                # One row has the event's own id, as ``emit`` gives it.
                id_ = event_id if index == first else UUID(int=event_id.int + 1 + index)
                emitted = Emitted(
                    id_, event_id, name, "Thing", key, "thing.changed", self._payload(number), None, None,
                    "{}", key if self._keyed[name] else None, database.next_position(),
                    f"key {number}" if self._plan.keyed else str(event_id), self._attempts, now, moment,
                )  # fmt: skip
                hex_ = id_.hex
                transaction.rows[hex_] = Row(emitted, now, now)
                made.append(hex_)
        longest = min(self._plan.longest_transaction, 0.02 if self._plan.flavour == "single" else 1.0)
        self._world.after(luck.random() * longest, self._end, transaction, made, numbers)

    def _payload(self, number: int) -> str:
        large = self._plan.large is not None and number >= self._plan.large
        return f'{{"n":{number}}}' + " " * (LARGE if large else 0)

    def _end(self, transaction: Transaction, made: Sequence[str], numbers: Sequence[int]) -> None:
        if transaction.over or self._world.random.random() < self._plan.abort:
            self._database.rollback(transaction)
            self._again(numbers)
            return
        rows = [row for id_ in made if (row := transaction.rows[id_]) is not None]
        self._database.commit(transaction, flush=self._waits_for_the_disk())
        self.events += [row.emitted for row in rows]
        self.under_way -= 1
        self._committed(sorted({row.emitted.destination for row in rows}))

    def _waits_for_the_disk(self) -> bool:
        """Return True, though an application may turn it off: ``emit`` makes commits with events wait."""
        return True

    def forget(self, gone: set[str]) -> None:
        """Remove events whose rows the server lost in a crash: their transactions never happened."""
        self.events = [emitted for emitted in self.events if emitted.id.hex not in gone]

    def _again(self, numbers: Sequence[int]) -> None:
        self.under_way -= 1
        self.emit(numbers, after=self._world.random.random() * 0.1)
