"""Whether a relay would hear a NOTIFY: sent on one connection, heard on another."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding, Unseen

CHANNEL = "relaybox_doctor"
"""The doctor's own, so that no relay is woken; always the same, because a pooler may keep a LISTEN."""

PATIENCE = 3.0
"""Seconds for a notification to arrive."""

_OPTIONS = {"connect_timeout": 5, "autocommit": True, "prepare_threshold": None}


async def look(context: DatabaseContext) -> Results:
    """LISTEN, and NOTIFY by another connection; a pooler is told by the process number that it invents."""
    if not context.settings.notify:
        return
    import psycopg

    try:
        heard, pooled = await _round_trip(context.settings.database)
    except psycopg.Error as error:
        yield Unseen(" ".join(str(error).split()))
        return
    if heard:
        return
    waits = "relays find events by polling, each poll_interval, instead of at once"
    if pooled:
        title = "a transaction pooler stands before the database"
        detail = f"what a session has set is lost between transactions, and so is LISTEN: {waits}"
        fix = (
            "give the relay the server's own address (on PgBouncer: or one with pool_mode = session), "
            "or set notify = false to be content with polling"
        )
        yield Finding("warning", title, detail, fix)
    else:
        title = "a notification that was sent did not arrive"
        fix = "give the relay a connection on which LISTEN works, or set notify = false"
        yield Finding("warning", title, f"within {PATIENCE:g} s: {waits}", fix)


async def _round_trip(url: str) -> tuple[bool, bool]:
    """Whether it was heard, and whether somebody stands between."""
    from psycopg import AsyncConnection
    from psycopg.conninfo import conninfo_to_dict

    options: dict[str, Any] = {**_OPTIONS, **conninfo_to_dict(url), "autocommit": True}
    ear = await AsyncConnection.connect(**options)
    try:
        cursor = await ear.execute("SELECT pg_backend_pid()")
        pooled = await cursor.fetchone() != (ear.info.backend_pid,)
        await ear.execute(f"LISTEN {CHANNEL}")
        word = uuid4().hex
        mouth = await AsyncConnection.connect(**options)
        try:
            await mouth.execute("SELECT pg_notify(%s, %s)", (CHANNEL, word))
            return await _hears(ear, word), pooled
        finally:
            await mouth.close()
    finally:
        await ear.close()


async def _hears(ear: Any, word: str) -> bool:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        async for notification in ear.notifies(timeout=left, stop_after=1):
            if notification.payload == word:
                return True
    return False
