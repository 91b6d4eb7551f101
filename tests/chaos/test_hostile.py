"""Answers without an end, of fifty sends at once, cost the neighbours nothing that they notice."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from relaybox.core.outcome import Delivered
from relaybox.core.settings import Destination
from relaybox.sinks.http.sink import HttpSink
from relaybox.testing.sink_contract import make_delivery
from tests.chaos.hostile import ANSWERS, FINE
from tests.waiting import cancel

IN_FLIGHT = 50
SECONDS = 3
ROUNDS = 3
"""If the receiver gets the processor late, many of its answers come at once."""
EVERY = 0.005
ONE = 5.0
"""Milliseconds: parsing one answer up to its limits, while the neighbour waits."""


@asynccontextmanager
async def sink_to(answers: str) -> AsyncIterator[HttpSink]:
    command = [sys.executable, "-m", "tests.chaos.hostile", answers]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(await server.stdout.readline())}/events"
    sink = HttpSink(
        Destination(answers, url, allow=["127.0.0.0/8"], concurrency=IN_FLIGHT, timeout="10m", lease="20m")
    )
    try:
        yield sink
    finally:
        await sink.close()
        server.kill()
        await server.wait()


async def attack(sink: HttpSink) -> None:
    """Send again as soon as an answer was given up, as a relay does with the next event."""
    while True:
        await asyncio.sleep(random.random())
        await sink.send([make_delivery()])


async def p99(sink: HttpSink) -> float:
    """Return the 99th percentile of how long the loop works during a send of the neighbour, in milliseconds.

    Processor time does not depend on what the receivers and other processes do at the same time.
    """

    async def one() -> float:
        start = time.thread_time()
        assert await sink.send([make_delivery()]) == [Delivered()]
        return time.thread_time() - start

    sends = []
    for _ in range(int(SECONDS / EVERY)):
        sends.append(asyncio.ensure_future(one()))
        await asyncio.sleep(EVERY)
    return sorted(await asyncio.gather(*sends))[int(len(sends) * 0.99)] * 1000


@pytest.mark.parametrize("answers", [name for name in ANSWERS if name != FINE])
async def test_fifty_endless_answers_at_most_double_the_neighbours_p99(answers: str) -> None:
    async with sink_to(FINE) as neighbour, sink_to(answers) as hostile:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(ROUNDS):
            normal = await p99(neighbour)
            sends = [asyncio.ensure_future(attack(hostile)) for _ in range(IN_FLIGHT)]
            attacked = await p99(neighbour)
            for send in sends:
                await cancel(send)
            if attacked <= 2 * normal + ONE:
                break
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert attacked <= 2 * normal + ONE, f"{attacked:.1f} ms instead of {normal:.1f} ms"
    assert more < 32_768
