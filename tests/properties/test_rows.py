"""Whatever is in a row: the relay goes on, what is behind it is delivered, and every question is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Outbox, Reject, Retry, Route
from relaybox.cli import events
from relaybox.database.dialects import DIALECTS
from relaybox.operate import documents
from relaybox.operate.admin import Admin
from relaybox.relay.observer import Observer
from relaybox.stores.ledger import Filter
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.upkeep.sample import SqlSamples
from tests.databases import engine
from tests.properties import edits
from tests.properties.conftest import Database, Feed
from tests.properties.edits import Sql
from tests.waiting import await_for

AREAS = {
    "sqlite": ("rows edited in SQLite", edits.SQLITE),
    "postgresql-18": ("rows edited in PostgreSQL", edits.POSTGRESQL),
    "mariadb": ("rows edited in MariaDB", edits.MARIADB),
}
SOON: dict[str, Any] = {"poll_interval": "50ms", "backoff": {"base": "10ms"}}
DESTINATIONS = (
    Destination("plain", "handler:", **SOON),
    Destination("ordered", "handler:", ordered=True, **SOON),
    Destination("buried", "handler:", dead_letter="letters", **SOON),
    Destination("letters", "handler:", **SOON),
)
ROUTED = ["plain", "ordered", "buried"]
UNCHECKED = {
    "sqlite": ["PRAGMA ignore_check_constraints = ON"],
    "postgresql": [],
    "mysql": ["SET SESSION check_constraint_checks = 0, SESSION sql_mode = ''"],
}


class Troubles(Observer):
    """What a relay had trouble with."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self.seen[f"{destination}: {doing}: {error!r}"] += 1


class Edited:
    """An outbox whose rows are edited by hand."""

    def __init__(self, url: str) -> None:
        self.kind = sa.make_url(url).get_backend_name()
        self.engine = engine(url)
        self.given: set[tuple[str, UUID]] = set()
        self.outbox = Outbox(
            url,
            destinations=DESTINATIONS,
            routes=[Route("*", to=ROUTED)],
            handlers={one.name: partial(self._take, one.name) for one in DESTINATIONS},
        )
        self.outbox.migrate()
        with self.engine.begin() as connection:
            # Of a newer version.
            connection.exec_driver_sql("ALTER TABLE outbox_event ADD COLUMN newer VARCHAR(10) DEFAULT 'new'")
            if self.kind == "postgresql":
                self._drop_constraints(connection)

    async def _take(self, name: str, event: Event) -> None:
        # Poison is recognised by its aggregate type: healthy events keep theirs, whatever else was edited.
        if event.aggregate_type != "Healthy":
            raise (Reject if event.id.int % 2 else Retry)("poison")
        self.given.add((name, event.id))

    def _drop_constraints(self, connection: sa.Connection) -> None:
        for check in sa.inspect(connection).get_check_constraints("outbox_event"):
            connection.exec_driver_sql(f'ALTER TABLE outbox_event DROP CONSTRAINT "{check["name"]}"')

    def emit(self, kind: str, count: int, *, of_one: int = 1) -> list[UUID]:
        """Events, so many of each aggregate."""
        with self.engine.begin() as connection:
            made = [
                self.outbox.emit(connection, kind, i // of_one, "order.paid", {"n": i}) for i in range(count)
            ]
        return [one.event_id for one in made]

    def rows(self) -> list[Any]:
        with self.engine.begin() as connection:
            return list(connection.exec_driver_sql("SELECT id FROM outbox_event").scalars())

    def now(self) -> Any:
        """Return the time by the database's clock, as its rows hold it."""
        with self.engine.begin() as connection:
            return connection.exec_driver_sql(f"SELECT {self._now}").scalar_one()

    def due_since(self, moment: Any) -> list[Any]:
        """Return the rows that a lane might have taken since then and did not."""
        mark = "?" if self.kind == "sqlite" else "%s"
        query = f"""SELECT destination FROM outbox_event
            WHERE destination IN ('plain', 'ordered', 'buried', 'letters')
            AND status = 'pending' AND next_attempt_at <= {mark}
            AND (leased_until IS NULL OR leased_until <= {self._now})"""  # noqa: S608
        with self.engine.begin() as connection:
            return list(connection.exec_driver_sql(query, (moment,)))

    @property
    def _now(self) -> str:
        return DIALECTS[self.kind].words["now"].replace("%", "%%" if self.kind == "mysql" else "%")

    def edit(self, r: Random, table: dict[str, tuple[Any, ...]], ids: Sequence[Any]) -> None:
        """Edit each of these rows in a way of its own."""
        with self.unchecked() as connection:
            for number, id_ in enumerate(ids):
                new = edits.edit(r, table)
                if "id" in new:
                    new["id"] = edits.unique(new["id"], number)
                self.change(connection, new, id_)

    def change(self, connection: sa.Connection, new: dict[str, Any], id_: Any) -> None:
        mark = "?" if self.kind == "sqlite" else "%s"
        places = [f"{name} = {v.text if isinstance(v, Sql) else mark}" for name, v in new.items()]
        values = [value for value in new.values() if not isinstance(value, Sql)]
        update = f"UPDATE outbox_event SET {', '.join(places)} WHERE id = {mark}"  # noqa: S608
        connection.exec_driver_sql(update, (*values, id_))

    @contextmanager
    def unchecked(self) -> Iterator[sa.Connection]:
        """Begin a transaction without constraints."""
        with self.engine.connect() as connection:
            for statement in UNCHECKED[self.kind]:
                connection.exec_driver_sql(statement)
            yield connection
            connection.commit()

    def clear(self) -> None:
        with self.engine.begin() as connection:
            for table in ("outbox_event", "outbox_attempt", "outbox_destination"):
                connection.exec_driver_sql(f"DELETE FROM {table}")  # noqa: S608
        self.given.clear()


@pytest.mark.parametrize("kind", AREAS)
def test_a_relay_goes_on_whatever_is_in_a_row(kind: str, feed: Feed, fresh_database: Database) -> None:
    area, table = AREAS[kind]
    edited = Edited(fresh_database(kind))

    def batch(r: Random, size: int) -> None:
        victims = edited.emit("Victim", size // 3, of_one=r.choice((1, 2, 4)))
        edited.edit(r, table, edited.rows())
        try:
            asyncio.run(check(edited, victims))
        finally:
            # What failed is fed once more.
            edited.clear()

    feed(area, batch, size=60)


async def check(edited: Edited, victims: Sequence[UUID]) -> None:
    """Deliver what is healthy, then ask all there is to be asked of what is not."""
    troubles = Troubles()

    async def arrive(healthy: list[UUID]) -> None:
        wanted = {(name, id_) for name in ROUTED for id_ in healthy}
        stuck = lambda: f"a lane is stuck: {troubles.seen.most_common(5)}"  # noqa: E731
        await await_for(lambda: edited.given >= wanted, stuck)

    async with edited.outbox.relay(observers=[troubles], patience=1.0):
        # Behind those that are claimed for the first time, then behind those that are settled.
        for _ in range(2):
            await arrive(edited.emit("Healthy", 2))
    assert not troubles.seen
    since = edited.now()

    async def taken() -> bool:
        if not edited.due_since(since):
            return True
        await edited.outbox.adrain()
        return False

    # More than once: what was emitted in the future does not keep one going, nor what waits behind it.
    await await_for(taken, lambda: f"nobody takes {edited.due_since(since)}")
    await ask(edited, victims)


async def ask(edited: Edited, ids: Sequence[UUID]) -> None:
    store = open_store(edited.outbox.settings.database, edited.outbox.tables, connections=1)
    admin = Admin(SqlLedger(store), DESTINATIONS, "tester")
    try:
        assert documents.to_json(documents.stats(await admin.stats(), await admin.destinations()))
        failures = await admin.failures()
        assert len(documents.failures(failures)["failures"]) == len(failures.groups)
        for group in failures.groups[:3]:
            wanted = Filter(destination=group.destination, fingerprint=group.fingerprint)
            assert (await admin.count("retry", wanted)).count == group.count
        assert await admin.health()
        samples = SqlSamples(store)
        for name in ("", *ROUTED, *await samples.names()):
            assert (await samples.measure(name, 100)).pending >= 0
        page = await admin.events(limit=100)
        assert len(documents.events(page, page.cursor)["events"]) == len(page.entries)
        for id_ in [ids[0], *(entry.id for entry in page.entries[:: len(page.entries) // 4 or 1])]:
            for detail in await admin.event(id_):
                [shown] = documents.deliveries([detail])["deliveries"]
                assert shown.destination == detail.entry.destination
                assert documents.to_json(shown)
                assert events._described(detail, shared=True)
                assert events._line(detail.entry)
            for reason in await admin.why(id_):
                assert documents.to_json(documents.reasons([reason]))
    finally:
        await store.close()
