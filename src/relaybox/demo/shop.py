"""The demo's application: a shop with concurrent clerks, a relay, and two webhook receivers, one flaky."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from aiohttp import web
from msgspec.structs import astuple
from sqlalchemy.orm import Session

from relaybox.core.event import Event
from relaybox.core.event_loop import run
from relaybox.core.settings import Destination, Route
from relaybox.demo.workspace import (
    FLAKY,
    HANDLER,
    RECEIVERS,
    WEBHOOK,
    Change,
    Journal,
    Placed,
    Receipt,
    Workspace,
)
from relaybox.outbox import Outbox
from relaybox.receive.webhook import Refusal, Webhooks

LEASE, TIMEOUT, FLAKY_TIMEOUT = 3.0, 2.0, 1.0
"""Seconds, far below the defaults, so that viewers see a killed relay's work taken over."""
POLICY: dict[str, Any] = {
    "ordered": True,
    "lease": LEASE,
    "timeout": TIMEOUT,
    "poll_interval": "100ms",
    "backoff": {"base": "100ms", "cap": "1s"},
    "max_attempts": 25,
}
CLERKS = 3
OPEN_ORDERS = 40
PAUSE_SECONDS = 0.025
ROLLED_BACK, SAVEPOINT = 0.08, 0.1
"""The fractions of transactions that roll back completely, or only a savepoint."""
MOODS = {"well": 0.72, "slow": 0.12, "500": 0.07, "503": 0.06, "hangs": 0.03}
SLOW_SECONDS = (0.05, 0.3)
STEPS = ("order.placed", "order.paid", "order.packed", "order.shipped")

metadata = sa.MetaData()
orders = sa.Table(
    "orders",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("changes", sa.Integer, nullable=False),
    sa.Column("total", sa.Integer, nullable=False),
)
changes = sa.Table(
    "order_changes",
    metadata,
    sa.Column("ref", sa.String(32), primary_key=True),
    sa.Column("order_id", sa.ForeignKey("orders.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("type", sa.String(50), nullable=False),
    sa.UniqueConstraint("order_id", "number"),
)


def make_outbox(workspace: Workspace) -> Outbox:
    """Return an outbox with three ordered destinations that all get every event."""
    http: dict[str, Any] = {**POLICY, "secret": workspace.secret(), "allow": ["127.0.0.0/8"]}
    outbox = Outbox(
        workspace.database,
        destinations=[
            Destination(WEBHOOK, workspace.url(WEBHOOK), **http),
            Destination(FLAKY, workspace.url(FLAKY), **{**http, "timeout": FLAKY_TIMEOUT}),
        ],
        routes=[Route("order.*", to=RECEIVERS)],
    )
    journal = Journal(workspace.journal(HANDLER, Receipt))

    @outbox.handler("order.*", name=HANDLER, **POLICY)
    def book(event: Event) -> None:
        journal.write(Receipt(change_of(event), time.monotonic()))

    return outbox


def change_of(event: Event) -> Change:
    """Return the change that an event is about."""
    return Change(event.payload["ref"], int(event.aggregate_id), event.payload["number"], event.type)


class ChangedMind(Exception):
    """Raised to roll back the transaction or savepoint."""


class Clerk:
    """A clerk who places and changes orders; safe in several threads at once."""

    def __init__(self, outbox: Outbox, engine: sa.Engine, journal: Journal) -> None:
        self._outbox = outbox
        self._engine = engine
        self._journal = journal
        self._open: list[int] = []

    def work(self, until: float) -> None:
        """Run transactions with short pauses until a time."""
        while time.monotonic() < until:
            time.sleep(random.expovariate(1 / PAUSE_SECONDS))
            with Session(self._engine) as session:
                self._transact(session, uuid4().hex)

    def _transact(self, session: Session, ref: str) -> None:
        try:
            with session.begin():
                order, number = self._advance(session)
                if random.random() < SAVEPOINT:
                    self._try_discount(session, order, number + 1)
                self._change(session, Change(ref, order, number, STEPS[number - 1]))
                if random.random() < ROLLED_BACK:
                    raise ChangedMind
        except ChangedMind:
            self._journal.write(Placed(ref, time.monotonic(), "rollback"))
            return
        self._journal.write(Placed(ref, time.monotonic()))
        if number == 1:
            self._open.append(order)

    def _advance(self, session: Session) -> tuple[int, int]:
        """Lock an order until the transaction ends; return it and the number of its next step."""
        if len(self._open) < OPEN_ORDERS:
            insert = orders.insert().values(changes=1, total=random.randint(10, 900))
            return session.execute(insert.returning(orders.c.id)).scalar_one(), 1
        order = random.choice(tuple(self._open))
        update = orders.update().where(orders.c.id == order, orders.c.changes < len(STEPS))
        number = session.execute(
            update.values(changes=orders.c.changes + 1).returning(orders.c.changes)
        ).scalar_one_or_none()
        if number is not None:
            return order, number
        with suppress(ValueError):
            self._open.remove(order)
        return self._advance(session)

    def _try_discount(self, session: Session, order: int, number: int) -> None:
        ref = uuid4().hex
        with suppress(ChangedMind), session.begin_nested():
            self._change(session, Change(ref, order, number, "order.discounted"))
            raise ChangedMind
        self._journal.write(Placed(ref, time.monotonic(), "savepoint"))

    def _change(self, session: Session, change: Change) -> None:
        session.execute(changes.insert().values(astuple(change)))
        payload = {"ref": change.ref, "number": change.number, "currency": "EUR", "channel": "web"}
        self._outbox.emit(session, "Order", change.order, change.type, payload)


def trade(workspace: Workspace) -> None:
    """Keep all clerks busy for the workspace's seconds."""
    outbox = make_outbox(workspace)
    engine = workspace.engine()
    engine.connect().close()
    workspace.ready()
    until = time.monotonic() + workspace.seconds
    clerk = Clerk(outbox, engine, Journal(workspace.journal("shop", Placed)))
    with ThreadPoolExecutor(CLERKS) as clerks:
        list(clerks.map(clerk.work, [until] * CLERKS))
    engine.dispose()


def deliver(workspace: Workspace) -> None:
    """Deliver until stopped or killed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    async def work() -> None:
        relay = make_outbox(workspace).relay(patience=3.0)
        workspace.ready()
        await relay.run()

    run(work())


class Receiver:
    """A receiver that writes signed events down, then acknowledges them; the flaky one sometimes fails."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self._webhooks = Webhooks(workspace.secret(), tolerance="5m", max_body="1MiB")
        self._moody = name == FLAKY
        self._received = Journal(workspace.journal(name, Receipt))
        self._refused = Journal(workspace.journal(name, str))

    async def receive(self, request: web.Request) -> web.Response:
        """Answer a request."""
        try:
            event = self._webhooks.read(request.headers, await request.read())
        except Refusal as refusal:
            return self._refuse(str(refusal.answer.status))
        mood = random.choices([*MOODS], [*MOODS.values()])[0] if self._moody else "well"
        match mood:
            case "500" | "503":
                return self._refuse(mood)
            case "hangs":
                await asyncio.sleep(2 * FLAKY_TIMEOUT)
                return self._refuse("504", mood)
            case "slow":
                await asyncio.sleep(random.uniform(*SLOW_SECONDS))
        self._received.write(Receipt(change_of(event), time.monotonic()))
        return web.Response()

    def _refuse(self, status: str, kind: str | None = None) -> web.Response:
        self._refused.write(kind or status)
        return web.Response(status=int(status))


def receive(name: str, workspace: Workspace) -> None:
    """Receive until killed; the flaky receiver adds errors, delays and timeouts."""
    asyncio.run(_serve(workspace, name))


async def _serve(workspace: Workspace, name: str) -> None:
    application = web.Application()
    application.router.add_post("/events", Receiver(workspace, name).receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", workspace.ports[name]).start()
    workspace.ready()
    await asyncio.Event().wait()


PARTS: dict[str, Callable[[Workspace], None]] = {
    "shop": trade,
    "relay": deliver,
    **{name: partial(receive, name) for name in RECEIVERS},
}
