"""A process that dies before its commit has emitted nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox import Outbox
from tests.integration.emit.apis import PLACES
from tests.integration.emit.conftest import create_tables, make_outbox, sync_engine

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


@pytest.mark.parametrize("kind", ["postgresql-18", "postgresql-15", "mariadb", "sqlite"])
def test_a_process_killed_before_its_commit_leaves_nothing(
    kind: str, fresh_database: Callable[[str], str], pytestconfig: pytest.Config
) -> None:
    names = [api.name for api, place in PLACES if place == kind]
    # SQLite lets one transaction write at a time, so each API gets a file.
    urls = {name: fresh_database(kind) for name in (names if kind == "sqlite" else names[:1])}
    for url in urls.values():
        create_tables(url, make_outbox(url))
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
        assert count_all(url, outbox) == (len(names) if len(urls) == 1 else 1)


def count_all(url: str, outbox: Outbox) -> Any:
    with sync_engine(url).connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(outbox.tables.event)).scalar()
