"""The receivers of webhooks, the flaky one too; each runs in a process of its own."""

from __future__ import annotations

import asyncio
import random
import time

from aiohttp import web
from msgspec import Struct, json

from relaybox.demo.shop import FLAKY_TIMEOUT
from relaybox.demo.workspace import FLAKY, WEBHOOK, Change, Fault, Journal, Receipt, Workspace
from relaybox.wire.signature import verify

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
    """Acknowledge what is signed, after writing it down; a flaky receiver sometimes does not."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self._secret = workspace.secret()
        self._moody = name == FLAKY
        self._received = Journal(workspace.received(name))
        self._refused = Journal(workspace.refused(name))

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
    """Return the change that an event is about."""
    event = json.decode(body, type=Body)
    return Change(event.data.ref, int(event.aggregate_id), event.data.number, event.type)


def receive_webhooks(workspace: Workspace) -> None:
    """Receive until killed."""
    asyncio.run(_serve(workspace, WEBHOOK))


def receive_flaky(workspace: Workspace) -> None:
    """Receive until killed, with errors, delays and timeouts."""
    asyncio.run(_serve(workspace, FLAKY))


async def _serve(workspace: Workspace, name: str) -> None:
    application = web.Application()
    application.router.add_post("/events", Receiver(workspace, name).receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", workspace.ports[name]).start()
    workspace.ready()
    await asyncio.Event().wait()
