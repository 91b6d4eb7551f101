"""What takes the webhooks, the flaky one too; each to be run in a process of its own."""

from __future__ import annotations

import asyncio
import random
import time

from aiohttp import web
from msgspec import Struct, json

from relaybox.demo.journal import Change, Fault, Journal, Receipt
from relaybox.demo.outbox import FLAKY_TIMEOUT
from relaybox.demo.workspace import FLAKY, WEBHOOK, Place
from relaybox.signature import verify

MOODS = {"well": 0.72, "slow": 0.12, "500": 0.07, "503": 0.06, "hangs": 0.03}
"""How often the flaky receiver does what."""
SLOW_SECONDS = (0.05, 0.3)


class Data(Struct):
    """The payload that the shop emitted, as far as it is of interest."""

    ref: str
    number: int


class Body(Struct):
    """What Relaybox posts."""

    type: str
    aggregate_id: str
    data: Data


class Receiver:
    """Acknowledges what is signed, after it was written down; in a bad mood it does not."""

    def __init__(self, place: Place, name: str) -> None:
        self._secret = place.secret()
        self._moody = name == FLAKY
        self._received = Journal(place.received(name))
        self._refused = Journal(place.refused(name))

    async def receive(self, request: web.Request) -> web.Response:
        """Answer one request."""
        body = await request.read()
        if not verify(body, request.headers, self._secret, now=time.time()):
            return self._refuse("401")
        mood = random.choices([*MOODS], [*MOODS.values()])[0] if self._moody else "well"
        match mood:
            case "500" | "503":
                return self._refuse(mood)
            case "hangs":
                await asyncio.sleep(2 * FLAKY_TIMEOUT)
                return self._refuse("504", mood)
            case "slow":
                await asyncio.sleep(random.uniform(*SLOW_SECONDS))
        self._received.write(Receipt(change_of(body), time.monotonic()))
        return web.Response()

    def _refuse(self, status: str, kind: str | None = None) -> web.Response:
        self._refused.write(Fault(kind or status, time.monotonic()))
        return web.Response(status=int(status))


def change_of(body: bytes) -> Change:
    """The change that an event tells of."""
    event = json.decode(body, type=Body)
    return Change(event.data.ref, int(event.aggregate_id), event.data.number, event.type)


def receive_webhooks(place: Place) -> None:
    """Receive until killed."""
    asyncio.run(_serve(place, WEBHOOK))


def receive_flaky(place: Place) -> None:
    """Receive until killed, as well as one can."""
    asyncio.run(_serve(place, FLAKY))


async def _serve(place: Place, name: str) -> None:
    application = web.Application()
    application.router.add_post("/events", Receiver(place, name).receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", place.ports[name]).start()
    place.ready()
    await asyncio.Event().wait()
