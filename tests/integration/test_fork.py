"""One outbox before a fork and after it, as with gunicorn's preload and Celery's prefork."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest

from tests.databases import POSTGRESQL
from tests.integration.shop import Databases
from tests.waiting import PATIENCE

SCRIPT = """
import asyncio, os, sys
import psycopg
from relaybox import Outbox
from tests.integration.shop import Databases
from tests.databases import POSTGRESQL

url = sys.argv[1]
outbox = Outbox(url)
seen = []

@outbox.handler("order.*", name="in_a_thread")
def in_a_thread(event):
    seen.append(event.payload["n"])

@outbox.handler("order.*", name="in_the_loop", ordered=True)
async def in_the_loop(event):
    seen.append(event.payload["n"])

def emit(n):
    with psycopg.connect(url) as connection:
        with outbox.transaction(connection):
            outbox.emit(connection, "Order", n, "order.paid", {"n": n})

async def relay_until(count):
    async with asyncio.timeout(30), outbox.relay():
        while len(seen) < count:
            await asyncio.sleep(0.01)

emit(0)
outbox.drain()
assert sorted(seen) == [0, 0], seen
asyncio.run(relay_until(2))
child = os.fork()
emit(2 if child else 1)
if not child:
    outbox.drain()
    emit(11)
    outbox.drain()
    os._exit(0)
outbox.drain()
_, status = os.waitpid(child, 0)
assert status == 0, status
emit(22)
outbox.drain()
assert 22 in seen, seen
"""


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_parent_and_child_deliver_side_by_side(kind: str, migrated_database: Databases) -> None:
    url = migrated_database(kind)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT destination, status, attempts, count(*) FROM outbox_event GROUP BY 1, 2, 3 ORDER BY 1"
        ).fetchall()
    assert rows == [("in_a_thread", "delivered", 1, 5), ("in_the_loop", "delivered", 1, 5)]
