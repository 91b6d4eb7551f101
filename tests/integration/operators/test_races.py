"""Operators work while relays do: nothing gets stuck, and no two wait for each other forever."""

from __future__ import annotations

import asyncio
import random
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.stores.ledger import Filter
from relaybox.stores.open import open_store
from relaybox.stores.store import Settlement, Store, Want
from tests.integration.operated import Operated
from tests.waiting import await_for

KEYS, EVENTS, ACTIONS = 12, 10, 40


class Relay:
    """Claims and settles as a relay does; ``calm``: it delivers everything."""

    def __init__(self, store: Store, name: str, seed: int) -> None:
        self.calm = False
        self._store = store
        self._name = name
        self._chance = random.Random(seed)

    async def work(self, done: asyncio.Event) -> None:
        while not done.is_set():
            want = Want("shop", self._name, 10, 60.0, ordered=True)
            claim = await self._store.claim(want)
            if claim.deliveries:
                await asyncio.sleep(self._chance.random() / 100)
                lost = await self._store.settle(self._settlements(claim.deliveries))
                assert not lost, "an operator's action took a lease away"
            else:
                await asyncio.sleep(0.01)

    def _settlements(self, deliveries: tuple[Delivery, ...]) -> list[Settlement]:
        stopped: set[str | None] = set()
        settlements = []
        for delivery in deliveries:
            outcome = Released() if delivery.ordering_key in stopped else self._outcome()
            if not isinstance(outcome, Delivered):
                stopped.add(delivery.ordering_key)
            settlements.append(Settlement(delivery, outcome))
        return settlements

    def _outcome(self) -> Outcome:
        if self.calm:
            return Delivered()
        return self._chance.choice([Delivered(), Retried(0.01, "busy"), Failed("refused")])


async def operate(outbox: Operated, ids: list[UUID], chance: random.Random) -> None:
    """Do all actions in no particular order."""
    for _ in range(ACTIONS):
        some = chance.sample(ids, 5)
        match chance.randrange(5):
            case 0:
                await outbox.admin.retry(Filter(status="failed"))
            case 1:
                await outbox.admin.discard(some)
            case 2:
                await outbox.admin.replay(some)
            case 3:
                await outbox.admin.retry(some)
            case 4:
                await outbox.admin.move("spare", "shop")
                await outbox.admin.move("shop", "spare")
                await outbox.admin.move("spare", "shop")


async def settle_down(outbox: Operated, relays: list[Relay]) -> None:
    """Let all that is left be delivered."""
    for relay in relays:
        relay.calm = True

    async def nothing_is_left() -> bool:
        await outbox.admin.retry(Filter(status="failed"))
        return not {row.status for row in outbox.rows()} & {"pending", "failed"}

    await await_for(nothing_is_left, lambda: f"all is delivered or discarded: {outbox.rows()}")


async def test_nothing_is_stuck_after_operators_and_relays_worked_at_the_same_time(outbox: Operated) -> None:
    ids = [outbox.emit("shop", key=f"k{number % KEYS}") for number in range(KEYS * EVENTS)]
    stores = [open_store(outbox.url, outbox.tables) for _ in range(2)]
    relays = [Relay(store, f"relay-{seed}", seed) for seed, store in enumerate(stores)]
    done = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            for relay in relays:
                tasks.create_task(relay.work(done))
            await operate(outbox, ids, random.Random(7))
            await settle_down(outbox, relays)
            done.set()
        assert {row.status for row in outbox.rows()} <= {"delivered", "discarded"}
        assert {row.event_id for row in outbox.rows()} == set(ids)
        assert {row.destination for row in outbox.rows()} <= {"shop", "spare"}
    finally:
        for store in stores:
            await store.close()
