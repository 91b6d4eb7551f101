"""A process that dies before its commit has emitted nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.databases import EVERY_KIND
from tests.integration.emit.apis import PLACES
from tests.integration.emit.conftest import make_outbox, sync_engine
from tests.integration.shop import Databases

KILLED = """
import asyncio, sys, time
from tests.integration.emit.apis import APIS
from tests.integration.emit.conftest import make_outbox

async def main():
    kept = []
    for line in sys.stdin:
        name, url = line.split()
        api = next(api for api in APIS if api.name == name)
        connection = await api.open(url)
        await api.begin(connection)
        await api.emit(make_outbox(url), connection, "Order", name, "order.killed", {}, idempotency_key=name)
        kept.append(connection)
    print("emitted", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_process_killed_before_its_commit_leaves_nothing(
    kind: str, migrated_database: Databases, pytestconfig: pytest.Config
) -> None:
    names = [api.name for api, place in PLACES if place == kind]
    # SQLite lets one transaction write at a time, so each API gets a file.
    urls = {name: migrated_database(kind) for name in (names if kind == "sqlite" else names[:1])}
    lines = "".join(f"{name} {urls.get(name, next(iter(urls.values())))}\n" for name in names)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=pytestconfig.rootpath,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(pytestconfig.rootpath)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines)
        process.stdin.close()
        assert process.stdout.readline() == "emitted\n"
        process.send_signal(signal.SIGKILL)
    for url in urls.values():
        outbox = make_outbox(url)
        with Session(sync_engine(url)) as session, session.begin():
            # A key that a dead transaction still held would be waited for, and be new once it is gone.
            for name in names if len(urls) == 1 else [name for name in names if urls[name] == url]:
                emitted = outbox.emit(session, "Order", name, "order.killed", 1, idempotency_key=name)
                assert not emitted.duplicate
        with sync_engine(url).connect() as connection:
            found = connection.scalar(sa.select(sa.func.count()).select_from(outbox.tables.event))
        assert found == (len(names) if len(urls) == 1 else 1)
