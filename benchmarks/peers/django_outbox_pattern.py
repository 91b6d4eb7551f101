"""django-outbox-pattern: its ``publish`` command without a pause, into a connection that does nothing."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.django_project.connection import Receiver
from benchmarks.harness import PAYLOAD, run
from benchmarks.peers.base import Arrivals, MeasuredPeer, check, emit_steadily, lanes, settle_down
from benchmarks.process import begin
from tests.django.databases import database

DESTINATION = "/topic/order.paid"
FILL = """
INSERT INTO published (id, destination, body, added, expires_at, retry, status, headers)
SELECT gen_random_uuid(), %(destination)s, %(body)s, now(), now() + interval '1 day', 0, %(status)s, '{}'
FROM generate_series(1, %(rows)s)"""


def publish(url: str, rows: int) -> float:
    """Return events per second of its command, in a process with Django set up."""
    from django_outbox_pattern.management.commands.publish import Command
    from django_outbox_pattern.models import Published, StatusChoice

    run(url, "TRUNCATE published")
    values = {"destination": DESTINATION, "body": json.dumps(PAYLOAD), "rows": rows}
    run(url, FILL, values | {"status": StatusChoice.SCHEDULE.value})
    settle_down(url)
    command = Command()
    # A batch takes every row: after it, none is left to wait for.
    Receiver.closed = functools.partial(setattr, command, "running", False)
    began = begin()
    command.handle()
    spent = time.monotonic() - began
    done = Published.objects.filter(status=StatusChoice.SUCCEEDED).count()
    check(done, done, rows)
    return rows / spent


# README of django-outbox-pattern: DEFAULT_PUBLISHED_CHUNK_SIZE and DEFAULT_PRODUCER_WAITING_TIME.
@dataclass(frozen=True)
class DjangoOutboxPattern:
    """One configuration."""

    chunk_size: int

    def __str__(self) -> str:
        return f"chunk size {self.chunk_size}, waiting time 0"

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Drain until every row is marked."""
        return await asyncio.to_thread(self._drain, url, rows)

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Poll without a pause: it offers nothing else."""
        arrivals = Arrivals(count)
        await asyncio.to_thread(self._receive, url, arrivals, ready)
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Save its model in a transaction."""
        await asyncio.to_thread(self._set_up, url)
        loop = asyncio.get_running_loop()
        # A connection of Django belongs to a thread.
        threads = [ThreadPoolExecutor(1) for _ in range(lanes(rate))]
        emitters = [functools.partial(loop.run_in_executor, one, _emit) for one in threads]
        return await emit_steadily(rate, count, emitters)

    def _drain(self, url: str, rows: int) -> float:
        self._set_up(url)
        seen = 0

        def handle(body: str) -> None:
            nonlocal seen
            json.loads(body)
            seen += 1

        Receiver.handle = handle
        rate = publish(url, rows)
        check(seen, rows, rows)
        return rate

    def _receive(self, url: str, arrivals: Arrivals, ready: Callable[[], None]) -> None:
        self._set_up(url)
        from django_outbox_pattern.management.commands.publish import Command

        command = Command()

        def closed() -> None:
            command.running = not arrivals.complete.is_set()

        Receiver.handle = lambda body: arrivals.note(json.loads(body)["n"])
        Receiver.closed = closed
        ready()
        command.handle()

    def _set_up(self, url: str) -> None:
        import django
        from django.conf import settings
        from django.core.management import call_command

        settings.configure(
            DATABASES={"default": database(url)},
            INSTALLED_APPS=["django_outbox_pattern"],
            USE_TZ=True,
            DJANGO_OUTBOX_PATTERN={
                "DEFAULT_CONNECTION_CLASS": f"{Receiver.__module__}.Receiver",
                "DEFAULT_PRODUCER_WAITING_TIME": 0,
                "DEFAULT_PUBLISHED_CHUNK_SIZE": self.chunk_size,
            },
        )
        django.setup()
        call_command("migrate", verbosity=0)


def _emit(n: int) -> None:
    from django.db import transaction
    from django_outbox_pattern.models import Published

    with transaction.atomic():
        Published(destination=DESTINATION, body={"n": n, **PAYLOAD}).save()


def peer(*sizes: int) -> MeasuredPeer:
    """Return django-outbox-pattern with these sizes of chunks; it keeps its rows and has no loop."""
    return MeasuredPeer(
        "django-outbox-pattern",
        ordered=False,
        keeps=True,
        setups=[DjangoOutboxPattern(size) for size in sizes],
        trial=2_000,
        loops=["asyncio"],
    )
