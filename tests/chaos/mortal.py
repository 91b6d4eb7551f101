"""Relays that come to grief: ``python -m tests.chaos.mortal DEED ORDER URL``, where ORDER is a JSON boolean.

``stall`` claims, says what it holds, waits for a line, then settles and says which leases it had lost.
``poison`` handles batches until every row is final, and is killed whenever it comes to the poisonous row; a
new one takes its place. It says how many rows it claimed each time, and in the end how often it died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from itertools import cycle
from typing import Any

import msgspec
import sqlalchemy as sa

from relaybox.outcome import Delivered, Failed, Outcome, Retried
from relaybox.store import Settlement, Store, Want
from tests.chaos.crew import DESTINATION, fork, make_outbox, open_store
from tests.databases import engine

LEASE = 0.4
POISON = 50


def want(owner: str, *, ordered: bool) -> Want:
    return Want(DESTINATION, owner, limit=100, lease=LEASE, ordered=ordered, on_failed="skip")


def say(**what: Any) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


async def stall(url: str, ordered: bool) -> None:
    store = open_store(url, make_outbox(url))
    held = (await store.claim(want("stalled", ordered=ordered))).deliveries
    say(held=[delivery.id for delivery in held])
    # Blocks the whole process on purpose.
    sys.stdin.readline()
    extended = await store.extend(held, LEASE)
    outcomes: list[Outcome] = [Delivered(), Retried(0, "too late"), Failed("too late")]
    settled = await store.settle(list(map(Settlement, held, cycle(outcomes))))
    released = await store.release(held)
    say(extend=sorted(extended), settle=sorted(settled), release=sorted(released))
    await store.close()


def poison(url: str, ordered: bool) -> None:
    deaths = 0
    while True:
        child = fork(lambda: asyncio.run(handle(url, ordered)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            break
        deaths += 1
    say(deaths=deaths)
    sys.exit(code)


async def handle(url: str, ordered: bool) -> None:
    outbox = make_outbox(url)
    store = open_store(url, outbox)
    while is_open(url, outbox.tables.event):
        await _handle_batch(store, ordered)
    await store.close()


async def _handle_batch(store: Store, ordered: bool) -> None:
    deliveries = (await store.claim(want("mortal", ordered=ordered))).deliveries
    if not deliveries:
        await asyncio.sleep(0.02)
        return
    say(claimed=len(deliveries))
    for delivery in deliveries:
        if msgspec.json.decode(delivery.payload or "")["n"] == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
    settlements = [Settlement(delivery, Delivered()) for delivery in deliveries]
    lost = await store.settle(settlements, on_failed="skip")
    assert not lost, lost


def is_open(url: str, event: sa.Table) -> bool:
    with engine(url).connect() as connection:
        left = sa.select(sa.func.count()).where(event.c.status == "pending")
        return connection.scalars(left).one() > 0


if __name__ == "__main__":
    _, deed, order, database = sys.argv
    if deed == "stall":
        asyncio.run(stall(database, order == "true"))
    else:
        poison(database, order == "true")
