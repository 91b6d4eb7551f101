"""A relay's life in small, with its misfortunes: it claims, handles each key in order, and settles.

Now and then it crashes while it holds leases, outstays its lease and settles too late, gives everything back,
or fails an event and releases the run behind it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.store import Settlement, Store
from tests.chaos.plan import Plan, make_outbox, open_store


def work(plan: Plan, owner: str, may_crash: bool) -> None:
    """Be a worker until told to stop; ``may_crash`` says whether it is allowed to."""
    asyncio.run(Worker(plan, owner, may_crash).run())


class Log:
    """Lines that survive the death of the process that wrote them."""

    def __init__(self, plan: Plan, owner: str) -> None:
        self._file = os.open(plan.log(owner), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **more: Any) -> None:
        """One line."""
        os.write(self._file, msgspec.json.encode({"what": what, **more}) + b"\n")


class Worker:
    """One process's worker."""

    def __init__(self, plan: Plan, owner: str, may_crash: bool) -> None:
        self._plan = plan
        self._owner = owner
        self._may_crash = may_crash
        self._luck = random.Random(f"{plan.seed} {owner}")
        self._log = Log(plan, owner)
        self._stopping = False

    async def run(self) -> None:
        """Work until told to stop."""
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
