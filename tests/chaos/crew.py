"""Runs a plan: ``python -m tests.chaos.crew PLAN`` forks the workers and emitters and replaces the dead.

Forked, not started from scratch, so that a crash costs no seconds. Ends well when every row is final.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.emit.row import Call
from relaybox.errors import StoreError
from relaybox.operate import open_relay as parts
from relaybox.stores.store import OnFailed, Settlement, Store, Want
from tests.databases import engine

DESTINATION = "chaos"
NEVER_FAILED = 10_000
WORKERS, EMITTERS = 8, 2
LEASE = 1.0
PATIENCE = 300.0  # Seconds until a run that has not come to its end is given up
CRASH, ZOMBIE, RELEASE, EXTEND, RETRY = 0.02, 0.02, 0.05, 0.05, 0.02
CRASHES = 3  # Of each worker and those that follow it


class Plan(msgspec.Struct, frozen=True):
    """One run. Chances are per claim, except ``RETRY`` and ``fail``, which are per row."""

    url: str
    logs: str
    seed: int
    bulk: int  # Rows that are there at the start
    emitted: int  # Rows that are emitted while the workers run
    keys: int = 200
    fail: float = 0.0
    on_failed: OnFailed = "block"
    ordered: bool = True  # False: the deliberately broken claim, plain SKIP LOCKED, on the same rows

    def want(self, owner: str) -> Want:
        return Want(DESTINATION, owner, limit=50, lease=LEASE, ordered=self.ordered, on_failed=self.on_failed)


def make_outbox(url: str) -> Outbox:
    place = Destination(DESTINATION, "console:", ordered=True, max_attempts=NEVER_FAILED)
    return Outbox(url, destinations=[place], routes=[Route("*", to=DESTINATION)])


def open_store(url: str, outbox: Outbox) -> Store:
    return parts.open_store(url, outbox.tables, connections=1)


class Crew:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._event = make_outbox(plan.url).tables.event
        self._emitters: set[int] = set()
        self._workers: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        plan = self._plan
        try:
            for number in range(EMITTERS):
                count = len(range(number, plan.emitted, EMITTERS))
                self._emitters.add(fork(partial(emit, plan, f"emitter{number}", count)))
            for slot in range(WORKERS):
                self._start_worker(slot, life=0)
            self._watch()
            self._stop()
        finally:
            for pid in (*self._workers, *self._emitters):
                os.kill(pid, signal.SIGKILL)

    def _start_worker(self, slot: int, life: int) -> None:
        may_crash = life < CRASHES
        pid = fork(partial(work, self._plan, f"worker{slot}.{life}", may_crash))
        self._workers[pid] = slot, life

    def _watch(self) -> None:
        end, look = time.monotonic() + PATIENCE, 0.0
        while self._emitters or time.monotonic() < look or self._left():
            look = time.monotonic() + 0.2 if time.monotonic() >= look else look
            self._bury(replace=True)
            if time.monotonic() > end:
                raise TimeoutError(f"not at its end after {PATIENCE:g} s; left: {self._left()}")
            time.sleep(0.01)

    def _stop(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        while self._workers:
            self._bury(replace=False)
            time.sleep(0.01)

    def _bury(self, *, replace: bool) -> None:
        while self._workers or self._emitters:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            slot, life = self._workers.pop(pid, (None, 0))
            self._emitters.discard(pid)
            if slot is None or code != -signal.SIGKILL:
                if code:
                    raise RuntimeError(f"a process ended with {code}")
            elif replace:
                self._start_worker(slot, life + 1)

    def _left(self) -> int:
        count = sa.select(sa.func.count()).where(self._event.c.status == "pending")
        with engine(self._plan.url).connect() as connection:
            return connection.scalars(count).one()


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


KEYS = sa.Table(
    "chaos_key",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("emitted", sa.Integer),
    mysql_engine="InnoDB",
)


def prepare(connection: sa.Connection, outbox: Outbox, plan: Plan) -> None:
    """Make the keys, and emit the rows that are there at the start, the keys in turn."""
    KEYS.create(connection)
    keys = [{"id": key, "emitted": len(range(key, plan.bulk, plan.keys))} for key in range(plan.keys)]
    connection.execute(KEYS.insert(), keys)
    outbox.emit_many(connection, [_call(i % plan.keys, i // plan.keys) for i in range(plan.bulk)])


def emit(plan: Plan, name: str, count: int) -> None:
    """Emit ``count`` events, a few in each transaction, each transaction about one or two keys."""
    luck = random.Random(f"{plan.seed} {name}")
    outbox = make_outbox(plan.url)
    parent = os.getppid()
    with engine(plan.url).connect() as connection:
        while count and os.getppid() == parent:
            keys = sorted(luck.sample(range(plan.keys), luck.choice((1, 2))))
            with connection.begin():
                for key in keys:
                    size = min(count, luck.randint(1, 5))
                    outbox.emit_many(connection, _next(connection, key, size))
                    count -= size
                time.sleep(luck.choice((0, 0, 0, 0.01)))


def _next(connection: sa.Connection, key: int, count: int) -> list[Call]:
    mine = KEYS.c.id == key
    connection.execute(KEYS.update().where(mine).values(emitted=KEYS.c.emitted + count))
    end = connection.scalars(sa.select(KEYS.c.emitted).where(mine)).one()
    return [_call(key, number) for number in range(end - count, end)]


def _call(key: int, number: int) -> Call:
    return Call("Thing", key, "thing.changed", {"n": number})


def work(plan: Plan, owner: str, may_crash: bool) -> None:
    asyncio.run(Worker(plan, owner, may_crash).run())


class Worker:
    def __init__(self, plan: Plan, owner: str, may_crash: bool) -> None:
        self._plan = plan
        self._owner = owner
        self._may_crash = may_crash
        self._luck = random.Random(f"{plan.seed} {owner}")
        log = Path(plan.logs) / f"{owner}.jsonl"
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stopping = False

    async def run(self) -> None:
        parent = os.getppid()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        store = open_store(self._plan.url, make_outbox(self._plan.url))
        while not self._stopping and os.getppid() == parent:
            try:
                await self._round(store)
            except StoreError as error:
                self._write("store errors", error=str(error))
        await store.close()

    def _stop(self) -> None:
        self._stopping = True

    async def _round(self, store: Store) -> None:
        claim = await store.claim(self._plan.want(self._owner))
        if not claim.deliveries:
            await asyncio.sleep(0 if claim.parked else 0.05)
            return
        if len(claim.deliveries) == 1 and claim.deliveries[0].suspect:
            await store.hold_alone(claim.deliveries[0], True)
        if self._chance(CRASH) and self._may_crash:
            await self._crash(store, claim.deliveries)
        if self._chance(ZOMBIE):
            self._write("zombies")
            await asyncio.sleep(LEASE * self._luck.uniform(1.05, 1.6))
        elif self._chance(EXTEND):
            await store.extend(claim.deliveries, LEASE * 1.5)
        if self._chance(RELEASE):
            await self._settle(store, [Settlement(delivery, Released()) for delivery in claim.deliveries])
            return
        outcomes = self._handle(claim.deliveries)
        # A relay settles what it has done while it still works on the rest.
        cut = self._luck.randrange(len(outcomes)) if self._chance(0.3) else 0
        for part in (outcomes[:cut], outcomes[cut:]):
            await self._settle(store, part)

    async def _crash(self, store: Store, deliveries: Sequence[Delivery]) -> None:
        if self._chance(0.5):
            half = deliveries[: len(deliveries) // 2]
            await self._settle(store, [Settlement(delivery, Delivered()) for delivery in half])
        self._write("crashes")
        os.kill(os.getpid(), signal.SIGKILL)

    def _handle(self, deliveries: Sequence[Delivery]) -> list[Settlement]:
        """Return the outcomes, each key's in order; what comes after a retry of its key is released."""
        stuck: set[str | None] = set()
        settlements = []
        for delivery in deliveries:
            outcome = Released() if delivery.ordering_key in stuck else self._send()
            if isinstance(outcome, Retried):
                stuck.add(delivery.ordering_key)
            settlements.append(Settlement(delivery, outcome))
        return settlements

    def _send(self) -> Outcome:
        if self._chance(RETRY):
            return Retried(self._luck.uniform(0.02, 0.3), "no luck")
        if self._chance(self._plan.fail):
            return Failed("bad luck")
        return Delivered()

    async def _settle(self, store: Store, settlements: Sequence[Settlement]) -> None:
        if not settlements:
            return
        lost = await store.settle(settlements, on_failed=self._plan.on_failed)
        self._write(
            "settles",
            token=settlements[0].delivery.lease_token.hex,
            settled=[delivery.id.hex for delivery, _ in settlements],
            lost=[id_.hex for id_ in lost],
            retries=sum(isinstance(o, Retried) and d.id not in lost for d, o in settlements),
        )

    def _write(self, what: str, **more: Any) -> None:
        """Write a line that is kept even if this process is killed."""
        os.write(self._log, msgspec.json.encode({"what": what, **more}) + b"\n")

    def _chance(self, share: float) -> bool:
        return self._luck.random() < share


if __name__ == "__main__":
    Crew(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)).run()
