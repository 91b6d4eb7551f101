"""Between a node and the database: a network that delays and loses, and a server that may be away.

A request that has left its node is executed whether the node is still alive or not. When an answer is lost,
nobody on the node knows whether the transaction was committed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from relaybox.database.pools.places import ConnectionPlaces
from relaybox.database.steps import Steps
from relaybox.errors import Locked, StoreError
from relaybox.stores.sql.store import SqlStore
from tests.simulation.database import Blocked, Database, Deadlock, Transaction
from tests.simulation.statements import Flavour, Query, Rows, Server, make_steps
from tests.simulation.world import Node, World

T = TypeVar("T")
Reply: TypeAlias = Callable[[Any], None]
Fate: TypeAlias = Literal["well", "refused", "request lost", "answer lost"]

TRIES = 5
IDLE_IN_TRANSACTION = 5.0  # Seconds after which the server ends a transaction whose session says nothing
CONNECTIONS = 3
LOCK_TIMEOUT = 0.5  # Seconds; less than at work, as leases are
SUFFERS = 1.0  # Seconds for which a lost round trip may keep a node from settling: until it tries again


@dataclass
class Weather:
    latency: float = 0.001
    fates: dict[Fate, float] = field(default_factory=dict)
    slow: float = 0.0
    down_until: float = 0.0
    read_only_until: float = 0.0
    met: Counter[str] = field(default_factory=Counter)  # What was met how often

    def heal(self) -> None:
        self.fates, self.slow = {}, 0.0
        self.down_until = self.read_only_until = 0.0


@dataclass
class Site:
    world: World
    flavour: Flavour
    server: Server
    weather: Weather
    dies: Callable[[Node], bool]  # Whether a node dies before the statement that it is about to send
    life: int = 0  # One more each time that the server was killed
    troubled: list[tuple[float, float]] = field(default_factory=list)
    cut_off: dict[str, float] = field(default_factory=dict)  # By node: until when it is cut off

    def __post_init__(self) -> None:
        self.database: Database = self.server.database

    def open_store(self, node: Node) -> SqlStore:
        """Return the product's own store, with a driver that talks to this server."""
        drivers = {"pipeline": Pipeline, "steps": Session, "single": Alone}
        if self.flavour == "steps":
            node.at_crash.append(partial(self.world.after, self.weather.latency, self._hang_up, node))
        driver = drivers[self.flavour]
        vital = None if self.flavour == "single" else driver(self, node, connections=1)
        return SqlStore(make_steps(self.flavour), driver(self, node), vital)

    def kill(self, down: float) -> set[str]:
        """Kill the server; the ids of the rows come back whose insertion it forgot."""
        forget = self.world.random.randint(0, self.database.unflushed) if self.flavour == "pipeline" else 0
        gone = self.database.kill(forget)
        self.life += 1
        self.weather.down_until = self.world.now + down
        self.trouble("server killed", down)
        return gone

    def _hang_up(self, node: Node) -> None:
        """Close a dead process's connections, as the kernel does."""
        for transaction in self.database.sessions(node):
            self.database.rollback(transaction)

    def trouble(self, what: str, seconds: float = 0.0) -> None:
        """Something happened, or goes on for so long, that every node may suffer from."""
        self.weather.met[what] += 1
        self.troubled.append((self.world.now, self.world.now + seconds))


@dataclass(slots=True, eq=False)
class Answer:
    _world: World
    _lost: bool
    _back: float
    _future: asyncio.Future[Any] | None = None
    arrived: bool = False
    value: Any = None

    def send(self, value: Any) -> None:
        if self._lost:
            value = StoreError("the connection was lost")
        if self._back:
            self._world.after(self._back, self.arrive, value)
        else:
            self.arrive(value)

    def arrive(self, value: Any) -> None:
        self.arrived, self.value = True, value
        if self._future is not None and not self._future.done():
            self._future.set_result(value)

    async def wait(self, node: Node) -> Any:
        self._future = node.create_future()
        return await self._future


class Wire:
    """One node's connections; what the kinds of databases have in common."""

    AT_ONCE = 0.6  # The part of all ways that take no time
    CHAINED = False  # Whether a settle that waits holds what the other calls of its lane need

    def __init__(self, site: Site, node: Node, connections: int = CONNECTIONS) -> None:
        self._site = site
        self._world = site.world
        self._weather = site.weather
        self._database = site.database
        self._node = node
        self._places = ConnectionPlaces(connections, chained=self.CHAINED)
        self._longest = 2 * site.weather.latency / (1.0 - self.AT_ONCE)

    async def run(self, begin: Callable[[], Steps[T]], *, lane: str = "") -> T:
        """Drive the steps; ``begin`` is called again where a deadlock was broken."""
        async with self._places.take(lane):
            for _ in range(TRIES):
                try:
                    return await self._transact(begin())
                except Deadlock:
                    self._weather.met["deadlock"] += 1
            raise StoreError("deadlock")

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    async def _transact(self, steps: Steps[T]) -> T:
        raise NotImplementedError

    async def _trip(self, serve: Callable[[Reply], None]) -> Any:
        """Make one round trip: ``serve`` is called at the server, with the callback for the answer."""
        if self._site.dies(self._node):
            await self._node.create_future()
        fate, there, back = self._fate()
        answer = Answer(self._world, fate == "answer lost", back)
        if fate == "refused" or fate == "request lost":
            self._world.after(there + back, answer.arrive, StoreError(f"the connection was {fate}"))
        elif there:
            self._world.after(there, self._arrive, serve, answer.send, self._site.life)
        else:
            self._arrive(serve, answer.send, self._site.life)
        value = answer.value if answer.arrived else await answer.wait(self._node)
        if isinstance(value, Exception):
            raise value
        return value

    def _arrive(self, serve: Callable[[Reply], None], reply: Reply, life: int) -> None:
        if life != self._site.life or self._world.now < self._weather.down_until:
            self._trouble("server away")
            reply(StoreError("the server closed the connection"))
        else:
            serve(reply)

    def _execute(
        self, transaction: Transaction, queries: Sequence[Query], results: list[Rows], done: Reply
    ) -> None:
        """Execute what is left of the queries, waiting where another transaction has to end first."""
        life, read_only = self._site.life, self._world.now < self._weather.read_only_until
        for query in queries[len(results) :]:
            if transaction.over:
                done(StoreError("the server ended the transaction"))
                return
            if read_only and query[0] not in ("now", "read_destination"):
                self._database.rollback(transaction)
                self._trouble("read-only node")
                done(StoreError("cannot execute this in a read-only transaction"))
                return
            try:
                results.append(self._site.server.execute(transaction, query))
            except Blocked as blocked:
                go_on = partial(self._go_on, transaction, queries, results, done, life)
                self._wait(transaction, blocked.holder, go_on, done)
                return
        done(results)

    def _wait(
        self, transaction: Transaction, holder: Transaction, go_on: Callable[[], None], done: Reply
    ) -> None:
        """Wait for another transaction to end, but not for longer than a lock is waited for."""
        waits = True

        def stop_waiting(then: Callable[[], None]) -> None:
            nonlocal waits
            if waits:
                waits = False
                then()

        def give_up() -> None:
            transaction.awaiting = None
            self._database.rollback(transaction)
            self._weather.met["lock timeout"] += 1
            done(Locked("lock timeout"))

        try:
            ended = partial(self._world.after, 0.0, stop_waiting, go_on)
            self._database.wait(transaction, holder, ended)
        except Deadlock as deadlock:
            self._database.rollback(transaction)
            done(deadlock)
        else:
            self._world.after(LOCK_TIMEOUT, stop_waiting, give_up)

    def _go_on(
        self, transaction: Transaction, queries: Sequence[Query], results: list[Rows], done: Reply, life: int
    ) -> None:
        transaction.awaiting = None
        if life != self._site.life:
            done(StoreError("the server closed the connection"))
        else:
            self._execute(transaction, queries, results, done)

    def _fate(self) -> tuple[Fate, float, float]:
        """Decide the fate of a round trip, and how long each way takes."""
        weather, random, now = self._weather, self._world.random.random, self._world.now
        # Some trips take no time at all: what others do in the meantime they do not see.
        there, back = random() - self.AT_ONCE, random() - self.AT_ONCE
        there = there * self._longest if there > 0.0 else 0.0
        back = back * self._longest if back > 0.0 else 0.0
        if self._site.cut_off and now < self._site.cut_off.get(self._node.name, 0.0):
            self._trouble("cut off")
            return "request lost", self._site.cut_off[self._node.name] - now, 0.01
        if weather.slow and random() < weather.slow:
            self._trouble("slow")
            there += random() * 0.8
            back += random() * 0.8
        for fate, chance in weather.fates.items():
            if random() < chance:
                self._trouble(fate)
                return fate, there, back
        return "well", there, back

    def _trouble(self, what: str) -> None:
        self._weather.met[what] += 1
        self._node.trouble(SUFFERS)


class Pipeline(Wire):
    """PostgreSQL: the statements of a yield travel together, and are one transaction."""

    async def _transact(self, steps: Steps[T]) -> T:
        try:
            queries: Any = next(steps)
            while True:
                try:
                    results = await self._trip(partial(self._serve, queries))
                except Locked as locked:
                    queries = steps.throw(locked)
                else:
                    queries = steps.send(results)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except Deadlock:
            raise StoreError("deadlock detected") from None

    SLOW = 0.15
    """The part of all statements after which others come in between, before the next one or the commit."""

    def _serve(self, queries: Sequence[Query], reply: Reply) -> None:
        transaction = self._database.begin(self._node)
        self._proceed(transaction, queries, [], reply, self._site.life)

    def _proceed(
        self, transaction: Transaction, queries: Sequence[Query], results: list[Rows], reply: Reply, life: int
    ) -> None:
        """Run the next statement; all of them are at the server, whatever happens to the node."""
        if life != self._site.life:
            reply(StoreError("the server closed the connection"))
            return
        if len(results) == len(queries):
            flush = not any(name.startswith("claim") for name, _ in queries)
            self._database.commit(transaction, flush=flush)
            reply(results)
            return

        def done(value: Any) -> None:
            if isinstance(value, Exception):
                reply(value)
            elif (chance := self._world.random.random()) < self.SLOW:
                pause = chance / self.SLOW * self._longest
                self._world.after(pause, self._proceed, transaction, queries, results, reply, life)
            else:
                self._proceed(transaction, queries, results, reply, life)

        self._execute(transaction, queries[: len(results) + 1], results, done)


class Session(Wire):
    """MariaDB: each statement is a round trip, and so is the COMMIT."""

    AT_ONCE = 0.8
    CHAINED = True

    async def _transact(self, steps: Steps[T]) -> T:
        transaction = self._database.begin(self._node)
        self._world.after(IDLE_IN_TRANSACTION, self._watch, transaction)
        try:
            queries: Any = next(steps)
            while True:
                results: list[Rows] = []
                for query in queries:
                    results += await self._trip(partial(self._execute, transaction, [query], []))
                    transaction.used_at = self._world.now
                queries = steps.send(results)
        except StopIteration as end:
            await self._trip(partial(self._commit, transaction))
            return end.value  # type: ignore[no-any-return]
        finally:
            # On whatever way it is left: a server rolls back when the connection is closed.
            self._database.rollback(transaction)

    def _commit(self, transaction: Transaction, reply: Reply) -> None:
        if transaction.over:
            reply(StoreError("the server ended the transaction"))
            return
        self._database.commit(transaction)
        reply(None)

    def _watch(self, transaction: Transaction) -> None:
        left = transaction.used_at + IDLE_IN_TRANSACTION - self._world.now
        if left <= 0:
            self._database.rollback(transaction)
        elif not transaction.over:
            self._world.after(left, self._watch, transaction)


class Alone(Wire):
    """SQLite: the whole transaction in the node's own process, the only writer of all."""

    async def _transact(self, steps: Steps[T]) -> T:
        return await self._trip(partial(self._serve, steps))  # type: ignore[no-any-return]

    def _serve(self, steps: Steps[T], reply: Reply) -> None:
        if self._node.dead:
            return
        transaction = self._database.begin(self._node)
        self._write(transaction, steps, reply)

    def _write(self, transaction: Transaction, steps: Steps[T], reply: Reply) -> None:
        if transaction.over or self._node.dead:
            self._database.rollback(transaction)
            reply(StoreError("the process ended"))
            return
        try:
            self._database.lock(transaction, "writer")
        except Blocked as blocked:
            again = partial(self._world.after, 0.0, self._write, transaction, steps, reply)
            self._database.wait(transaction, blocked.holder, again)
            return
        results: Any = []
        try:
            queries: Any = next(steps)
            while True:
                self._execute(transaction, queries, results := [], _raise)
                if self._site.dies(self._node):
                    self._database.rollback(transaction)
                    return
                queries = steps.send(results)
        except StopIteration as end:
            self._database.commit(transaction)
            reply(end.value)
        except StoreError as error:
            self._database.rollback(transaction)
            reply(error)


def _raise(value: Any) -> None:
    if isinstance(value, Exception):
        raise value
