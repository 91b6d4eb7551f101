"""Runs a plan: ``python -m tests.chaos.crew PLAN`` forks the workers and emitters and replaces the dead.

Forked, not started anew, so that a crash costs no seconds. Ends well when every row is final.
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
from msgspec import Struct

from relaybox import Destination, Outbox, Route, parts
from relaybox.emit.row import Call
from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.store import OnFailed, Settlement, Store, Want
from tests.databases import engine

DESTINATION = "chaos"
NEVER_FAILED = 10_000


class Plan(Struct, frozen=True):
    """One run. Chances are per claim, except ``retry`` and ``fail``, which are per row."""

    url: str
    logs: str
    seed: int
    bulk: int  # Rows that are there at the start
    emitted: int  # Rows that are emitted while the workers run
    keys: int = 200
    workers: int = 8
    emitters: int = 2
    limit: int = 50
    lease: float = 1.0
    crash: float = 0.02
    crashes_each: int = 3
    zombie: float = 0.02
    release: float = 0.05
    extend: float = 0.05
    retry: float = 0.02
    fail: float = 0.0
    on_failed: OnFailed = "block"
    ordered: bool = True  # False: the deliberately broken claim, plain SKIP LOCKED, on the same rows
    patience: float = 120.0  # Seconds until a run that has not come to its end is given up

    def want(self, owner: str) -> Want:
        return Want(
            DESTINATION,
            owner,
            limit=self.limit,
            lease=self.lease,
            ordered=self.ordered,
            on_failed=self.on_failed,
        )

    def log(self, owner: str) -> Path:
        return Path(self.logs) / f"{owner}.jsonl"


def make_outbox(url: str) -> Outbox:
    place = Destination(DESTINATION, "console:", ordered=True, max_attempts=NEVER_FAILED)
    return Outbox(url, destinations=[place], routes=[Route("*", to=DESTINATION)])


def open_store(url: str, outbox: Outbox) -> Store:
    return parts.open_store(url, outbox.tables, connections=1)


CRASHED = -signal.SIGKILL


class Crew:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._event = make_outbox(plan.url).tables.event
        self._emitters: set[int] = set()
        self._workers: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        plan = self._plan
        try:
            for number in range(plan.emitters):
                count = len(range(number, plan.emitted, plan.emitters))
                self._emitters.add(fork(partial(emit, plan, f"emitter{number}", count)))
            for slot in range(plan.workers):
                self._start_worker(slot, life=0)
            self._watch()
            self._stop()
        finally:
            for pid in (*self._workers, *self._emitters):
                os.kill(pid, signal.SIGKILL)

    def _start_worker(self, slot: int, life: int) -> None:
        may_crash = life < self._plan.crashes_each
        pid = fork(partial(work, self._plan, f"worker{slot}.{life}", may_crash))
        self._workers[pid] = slot, life

    def _watch(self) -> None:
        end = time.monotonic() + self._plan.patience
        look = 0.0
        while True:
            self._bury(replace=True)
            if not self._emitters and time.monotonic() > look:
                if not (left := self._left()):
                    return
                look = time.monotonic() + 0.2
            if time.monotonic() > end:
                raise TimeoutError(f"not at its end after {self._plan.patience:g} s; left: {left}")
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
            if slot is None or code != CRASHED:
                if code:
                    raise RuntimeError(f"a process ended with {code}")
            elif replace:
                self._start_worker(slot, life + 1)

    def _left(self) -> dict[str, int]:
        """How many rows are open, by whether they are leased, due or parked."""
        event = self._event.c
        state = sa.case(
            (event.leased_until.is_not(None), "leased"),
            (event.next_attempt_at.is_(None), "parked"),
            else_="waiting",
        )
        count = sa.select(state.label("state"), sa.func.count()).where(event.status == "pending")
        with engine(self._plan.url).connect() as connection:
            return {row[0]: row[1] for row in connection.execute(count.group_by("state"))}


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own; its number."""
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


class Log:
    """Lines that survive the death of the process that wrote them."""

    def __init__(self, plan: Plan, owner: str) -> None:
        self._file = os.open(plan.log(owner), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **more: Any) -> None:
        os.write(self._file, msgspec.json.encode({"what": what, **more}) + b"\n")


class Worker:
    def __init__(self, plan: Plan, owner: str, may_crash: bool) -> None:
        self._plan = plan
        self._owner = owner
        self._may_crash = may_crash
        self._luck = random.Random(f"{plan.seed} {owner}")
        self._log = Log(plan, owner)
        self._stopping = False

    async def run(self) -> None:
        parent = os.getppid()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        store = open_store(self._plan.url, make_outbox(self._plan.url))
        while not self._stopping and os.getppid() == parent:
            try:
                await self._round(store)
            except StoreError as error:
                self._log.write("store errors", error=str(error))
        await store.close()

    def _stop(self) -> None:
        self._stopping = True

    async def _round(self, store: Store) -> None:
        claim = await store.claim(self._plan.want(self._owner))
        if not claim.deliveries:
            await asyncio.sleep(0 if claim.parked else 0.05)
            return
        if self._chance(self._plan.crash) and self._may_crash:
            await self._crash(store, claim.deliveries)
        if self._chance(self._plan.zombie):
            self._log.write("zombies")
            await asyncio.sleep(self._plan.lease * self._luck.uniform(1.05, 1.6))
        elif self._chance(self._plan.extend):
            await store.extend(claim.deliveries, self._plan.lease * 1.5)
        if self._chance(self._plan.release):
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
        self._log.write("crashes")
        os.kill(os.getpid(), signal.SIGKILL)

    def _handle(self, deliveries: Sequence[Delivery]) -> list[Settlement]:
        """The outcomes, each key's in order; what comes after a retry of its key is released."""
        stuck: set[str | None] = set()
        settlements = []
        for delivery in deliveries:
            outcome = Released() if delivery.ordering_key in stuck else self._send()
            if isinstance(outcome, Retried):
                stuck.add(delivery.ordering_key)
            settlements.append(Settlement(delivery, outcome))
        return settlements

    def _send(self) -> Outcome:
        if self._chance(self._plan.retry):
            return Retried(self._luck.uniform(0.02, 0.3), "no luck")
        if self._chance(self._plan.fail):
            return Failed("bad luck")
        return Delivered()

    async def _settle(self, store: Store, settlements: Sequence[Settlement]) -> None:
        if not settlements:
            return
        lost = await store.settle(settlements, on_failed=self._plan.on_failed)
        self._log.write(
            "settles",
            token=settlements[0].delivery.lease_token.hex,
            settled=[delivery.id.hex for delivery, _ in settlements],
            lost=[id_.hex for id_ in lost],
            retries=sum(isinstance(o, Retried) and d.id not in lost for d, o in settlements),
        )

    def _chance(self, share: float) -> bool:
        return self._luck.random() < share


if __name__ == "__main__":
    Crew(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)).run()
