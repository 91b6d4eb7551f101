"""A relay in a process of its own, that comes to grief: ``python -m tests.chaos.mortal_relay PLAN``.

It is an application's relay. Where the plan names a death its store is wrapped, and only to kill the process
at that point. Handlers write what they took to the standard output, a line each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any, Literal, TypeAlias

import msgspec

from relaybox import Destination, Event, Outbox, Route, parts
from relaybox.store import Claim, Settlement, Want
from tests.integration.shop import MEMBERSHIP, SOON

Death: TypeAlias = Literal["never", "after claim", "after acknowledgement"]
POISON = 7
KILLED = 9


class Plan(msgspec.Struct, frozen=True):
    """What the process does: sinks by name, with the options of all of them."""

    database: str
    sinks: dict[str, str]
    options: dict[str, Any]
    death: Death = "never"
    patience: float = 20.0

    def outbox(self) -> Outbox:
        """An outbox whose events go to every destination."""
        urls = {name: sink for name, sink in self.sinks.items() if sink not in HANDLERS}
        outbox = Outbox(
            self.database,
            destinations=[Destination(name, url, **self.options) for name, url in urls.items()],
            routes=[Route("*", to=list(urls))] if urls else [],
        )
        for name in self.sinks.keys() - urls.keys():
            outbox.handler("*", name=name, **self.options)(handler_of(name, self.sinks[name]))
        return outbox


def die() -> None:
    """As by the OOM killer: no cleanup, no word."""
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """A store in which the process dies; everything else is the store's own."""

    def __init__(self, store: Any, death: Death) -> None:
        self._store = store
        self._death = death

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, want: Want) -> Claim:
        claim: Claim = await self._store.claim(want)
        if self._death == "after claim" and claim.deliveries:
            die()
        return claim

    async def settle(self, settlements: list[Settlement], **policy: Any) -> Any:
        if self._death == "after acknowledgement":
            die()
        return await self._store.settle(settlements, **policy)


async def note(event: Event, name: str) -> None:
    """Take it."""
    os.write(1, msgspec.json.encode([name, event.payload["n"]]) + b"\n")


async def kill(event: Event, name: str) -> None:
    """Take it, unless it is the one that ends the process."""
    if event.payload["n"] == POISON:
        os._exit(KILLED)
    await note(event, name)


async def dawdle(event: Event, name: str) -> None:
    """Take it after a while, so that others are in flight when the process ends."""
    await asyncio.sleep(0.3)
    await note(event, name)


HANDLERS = {"note": note, "kill": kill, "dawdle": dawdle}


def handler_of(name: str, kind: str) -> Any:
    """The handler of that kind, told what its destination is called."""

    async def handle(event: Event) -> None:
        await HANDLERS[kind](event, name)

    return handle


async def main() -> None:
    """Run the relay of the plan until it is stopped, or worse."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    MEMBERSHIP["interval"] = SOON
    open_store = parts.open_store
    parts.open_store = lambda *given, **options: Mortal(open_store(*given, **options), plan.death)  # type: ignore
    await plan.outbox().relay(patience=plan.patience).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
