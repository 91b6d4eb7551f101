"""What ``relay --listen`` serves of its relay: metrics, whether it lives, and whether deliveries flow."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial

from msgspec import json

from relaybox.admin import Admin
from relaybox.app import Outbox
from relaybox.cli.listen import Page, Reply, serving
from relaybox.errors import MissingExtra
from relaybox.health import Health, Problem
from relaybox.metrics import CONTENT_TYPE, Gauges, Latest, MetricsObserver
from relaybox.observe import Observer
from relaybox.observers.flow import Flow
from relaybox.relay.relay import Relay

try:
    from prometheus_client import ProcessCollector, generate_latest
except ImportError:
    raise MissingExtra("prometheus-client", "metrics") from None

SILENT = 30.0
"""Seconds without an answer of the database after which a relay is not ready."""
STALLED = 45.0
"""Seconds for which work is due and nothing settles: together with a look now and then, within a minute."""


class Monitor:
    """Hears of a relay's work, and has pages that show it."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        namespace = outbox.settings.namespace
        self._metrics = MetricsObserver(namespace=namespace)
        self._gauges = Gauges(namespace)
        self._flow = Flow()
        self._health: Latest[Health] = Latest(stale=SILENT)
        self._metrics.registry.register(self._gauges)
        ProcessCollector(registry=self._metrics.registry)

    @property
    def observers(self) -> list[Observer]:
        """For ``outbox.relay``."""
        return [self._metrics, self._flow]

    @asynccontextmanager
    async def serving(self, listening: socket.socket, relay: Relay) -> AsyncIterator[None]:
        """Serve the pages of the relay beside the block, with one more connection to the database."""
        async with self._outbox.admin("relay", connections=1) as admin:
            pages: dict[str, Page] = {
                "/metrics": partial(self._exposed, admin),
                "/livez": _alive,
                "/readyz": partial(self._ready, admin, relay),
            }
            try:
                async with serving(listening, pages):
                    yield
            finally:
                await self._gauges.close()
                await self._health.close()

    async def _exposed(self, admin: Admin) -> Reply:
        await self._gauges.refresh(admin)
        return Reply(200, CONTENT_TYPE, generate_latest(self._metrics.registry))

    async def _ready(self, admin: Admin, relay: Relay) -> Reply:
        problems = [problem async for problem in self._problems(admin, relay)]
        shown = [asdict(problem) | {"reason": _shown(problem.reason)} for problem in problems]
        document = {"ready": not problems, "problems": shown}
        return Reply(503 if problems else 200, "application/json", json.encode(document) + b"\n")

    async def _problems(self, admin: Admin, relay: Relay) -> AsyncIterator[Problem]:
        health = await self._health.look(lambda: admin.health(STALLED))
        silent = health is None or self._health.age > SILENT
        if silent:
            since = None if health is None else self._health.age
            yield Problem(None, "the database has not answered", since)
        known = {problem.destination for problem in health.problems} if health else set()
        for problem in health.problems if health else ():
            yield problem
        for problem in self._own(relay, circuits=silent):
            if problem.destination is None or problem.destination not in known:
                yield problem

    def _own(self, relay: Relay, *, circuits: bool) -> Iterator[Problem]:
        """What the relay knows itself; of ``circuits`` the database knows better, unless it is away."""
        for stop in self._flow.stops(circuits=circuits):
            yield Problem(*stop)
        canary = relay.canary
        if canary is not None and canary.refused is not None:
            yield Problem(
                canary.destination, f"its test event was refused: {canary.refused}", canary.unproven
            )
        elif canary is not None and (seconds := canary.overdue) is not None:
            yield Problem(canary.destination, "its test event was not acknowledged", seconds)


def _shown(reason: str) -> str:
    """What anybody may know: behind the colon stand addresses and what others said."""
    return reason.partition(":")[0]


async def _alive() -> Reply:
    return Reply(200, "application/json", b'{"alive":true}\n')
