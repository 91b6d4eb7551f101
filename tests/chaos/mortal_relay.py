"""A relay in a process of its own, that comes to grief: ``python -m tests.chaos.mortal_relay PLAN``.

It is an application's relay. Where the plan names a death its store is wrapped, and only to kill the process
at that point. Handlers write what they took to the standard output, a line each.
A wrapped store writes the ids of rows that a settle found locked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from relaybox import Destination, Event, Outbox, Route
from relaybox.core.event import Delivery
from relaybox.database.steps import Steps
from relaybox.errors import RowsLocked
from relaybox.operate import open_relay as parts
from relaybox.sinks.handler import HandlerSink
from relaybox.stores.store import Claim, Settlement, Want
from relaybox.wire.envelope import event_of
from tests.commit import ROOT
from tests.integration.shop import MEMBERSHIP, SOON

Death: TypeAlias = Literal["never", "after claim", "after acknowledgement"]
POISON = 7
KILLED = 9
INSERT = sa.text("INSERT INTO effect (n) VALUES (:n)")


class Plan(msgspec.Struct, frozen=True):
    """What the process does: URLs or kinds of handlers by name, with the options of all of them."""

    database: str
    sinks: dict[str, str]
    options: dict[str, Any]
    death: Death = "never"
    patience: float = 20.0
    beside_locks: int | None = None
    """After how many transactions of a settle that goes on beside locked rows the process dies."""

    def outbox(self) -> Outbox:
        urls = {name: sink for name, sink in self.sinks.items() if sink not in (*HANDLERS, *ONCE)}
        outbox = Outbox(
            self.database,
            destinations=[Destination(name, url, **self.options) for name, url in urls.items()],
            routes=[Route("*", to=list(urls))] if urls else [],
        )
        for name in self.sinks.keys() - urls.keys():
            kind = self.sinks[name]
            handler = ONCE[kind] if kind in ONCE else handler_of(name, kind)
            outbox.handler("*", name=name, once=kind in ONCE, **self.options)(handler)
        return outbox


@contextmanager
def process(
    plan: Plan, environment: Mapping[str, str] | None = None, stdout: Any = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a relay; it is killed at the end, whatever happened."""
    command = [sys.executable, "-m", "tests.chaos.mortal_relay", msgspec.json.encode(plan).decode()]
    env = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, cwd=ROOT, stdout=stdout, env=env) as started:
        try:
            yield started
        finally:
            started.kill()


class Mortal:
    """A store in which the process dies as by the OOM killer; everything else is the store's own."""

    def __init__(self, store: Any, plan: Plan) -> None:
        self._store = store
        self._death = plan.death
        if plan.beside_locks is not None:
            store.steps.settle_free = dying(store.steps.settle_free, plan.beside_locks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, want: Want) -> Claim:
        claim: Claim = await self._store.claim(want)
        if self._death == "after claim" and claim.deliveries:
            os.kill(os.getpid(), signal.SIGKILL)
        return claim

    async def settle(self, settlements: list[Settlement], **policy: Any) -> Any:
        if self._death == "after acknowledgement":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return await self._store.settle(settlements, **policy)
        except RowsLocked as error:
            for row in error.rows:
                os.write(1, f"{row}\n".encode())
            raise


def dying(begin: Callable[..., Steps[Any]], transactions: int) -> Callable[..., Steps[Any]]:
    """Return steps in which the process dies after so many transactions, if there are so many."""

    def steps(*given: Any) -> Steps[Any]:
        own, results = begin(*given), None
        for _ in range(transactions):
            try:
                queries = own.send(results)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            results = yield queries
        os.kill(os.getpid(), signal.SIGKILL)

    return steps


async def note(event: Event, name: str) -> None:
    os.write(1, msgspec.json.encode([name, event.payload["n"]]) + b"\n")


async def kill(event: Event, name: str) -> None:
    if event.payload["n"] == POISON:
        os._exit(KILLED)
    await note(event, name)


async def dawdle(event: Event, name: str) -> None:
    """Take it after a while, so that others are in flight when the process ends."""
    await asyncio.sleep(0.3)
    await note(event, name)


HANDLERS = {"note": note, "kill": kill, "dawdle": dawdle}


def handler_of(name: str, kind: str) -> Any:
    async def handle(event: Event) -> None:
        await HANDLERS[kind](event, name)

    return handle


def write(event: Event, connection: sa.Connection) -> None:
    connection.execute(INSERT, event.payload)


async def awrite(event: Event, connection: AsyncConnection) -> None:
    await connection.execute(INSERT, event.payload)


ONCE = {"once": write, "once, asynchronous": awrite}
"""Handlers that run once, whose sink writes down each delivery, also what the inbox knows already."""


class Telling(HandlerSink):
    def begin(self, delivery: Delivery) -> Awaitable[None] | None:
        os.write(1, b"%d\n" % event_of(delivery).payload["n"])
        return super().begin(delivery)


async def main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    MEMBERSHIP["interval"] = SOON
    open_store = parts.open_store
    parts.open_store = lambda *given, **options: Mortal(open_store(*given, **options), plan)  # type: ignore
    outbox = plan.outbox()
    if set(plan.sinks.values()) & ONCE.keys():
        outbox._sink_of = lambda destination, handlers: Telling(
            destination, parts.handler_of(destination, handlers)
        )
    await outbox.relay(patience=plan.patience).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
