"""What was sent exists after a crash of the server, also where its emitter did not wait for the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psycopg
import pytest

from relaybox import Event, Outbox
from tests.chaos.cluster import Cluster, running
from tests.conftest import available
from tests.waiting import await_for

PAID = "INSERT INTO paid (total) VALUES (42)"


@pytest.fixture(params=["postgresql-18", "postgresql-15"])
def server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with available(request.param, running(request.param)) as server:
        assert isinstance(server, Cluster)
        yield server


def stop_wal_writer(url: str) -> None:
    """Write nothing to disk but commits that wait for it, so that a crash forgets the rest."""
    with psycopg.connect(url) as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        row = connection.execute(query).fetchone()
    assert row is not None
    os.kill(row[0], signal.SIGSTOP)


def emit(outbox: Outbox, url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("SET LOCAL synchronous_commit = off")
        connection.execute(PAID)
        outbox.emit(connection, "Order", 1, "order.paid", {"total": 42})


def exist(url: str) -> tuple[int, ...]:
    """Return how many events and how many rows of the application there are."""
    with psycopg.connect(url) as connection:
        query = "SELECT (SELECT count(*) FROM outbox_event), (SELECT count(*) FROM paid)"
        row = connection.execute(query).fetchone()
    assert row is not None
    return row


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
async def test_an_event_that_was_sent_survives_a_crash_of_the_server(server: Cluster, ordered: bool) -> None:
    outbox, received = Outbox(server.url), []

    @outbox.handler("order.*", name="receiver", ordered=ordered)
    async def receive(event: Event) -> None:
        received.append(event.id)
        # At once: the relay settles next, and that would write to disk what came before it.
        if len(received) == 2:
            server.kill()

    await outbox.amigrate()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE paid (total int)")
    async with outbox.relay():
        emit(outbox, server.url)
        await await_for(lambda: received, "the relay is at work")
        stop_wal_writer(server.url)
        emit(outbox, server.url)
        await await_for(lambda: len(received) > 1, "the event was delivered")
        server.start()
        assert exist(server.url) == (2, 2)
