"""Documents in a database with an outbox, and writers that change them during a backfill."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from relaybox import Call, Destination, Outbox
from relaybox.search import Source, abackfill
from relaybox.search.results import Backfilled
from relaybox.search.source import Item
from tests.databases import engine
from tests.integration.project import Project
from tests.writing import writing

DESTINATIONS = (Destination("search", "console:", ordered=True), Destination("mail", "console:"))
SECONDS = 60.0


APP = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from relaybox import Call, Destination, Outbox
from relaybox.search import Source

outbox = Outbox(destinations=[Destination("search", "console:", ordered=True)])
document = sa.table("document", sa.column("id", sa.Integer), sa.column("title", sa.String))
documents = Source(sa.select(document.c.id, document.c.title), aggregate_type="Document")
letters = [{"id": letter} for letter in "abc"]
odd = [{"id": 1}, {"id": 2, "data": b"bytes"}, {"id": 3}]
nothing = 5


class Base(DeclarativeBase):
    pass


class Chapter(Base):
    __tablename__ = "chapter"
    id: Mapped[int] = mapped_column(primary_key=True)
"""


class Base(DeclarativeBase):
    """The tables of the archive."""


class Author(Base):
    """Writes documents."""

    __tablename__ = "author"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(50))


class Document(Base):
    """What is to be found."""

    __tablename__ = "document"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(sa.String(50))
    author_id: Mapped[int] = mapped_column(default=1)


class Archive:
    """A database with Relaybox's tables, to which documents are added."""

    def __init__(self, url: str, count: int = 0) -> None:
        self.url = url
        self.outbox = Outbox(url, destinations=DESTINATIONS)
        self.engine = engine(url)
        if self.engine.dialect.name == "sqlite":
            _begin_as_writer(self.engine)
        Base.metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.execute(sa.insert(Author).values(id=1, name="Ann"))
        self.add(count)

    def add(self, count: int) -> None:
        rows = [{"id": number, "title": f"title {number}", "author_id": 1} for number in range(1, count + 1)]
        with self.engine.begin() as connection:
            for start in range(0, count, 1_000):
                connection.execute(sa.insert(Document), rows[start : start + 1_000])

    def events(self) -> list[tuple[str, str, Any, dict[str, Any]]]:
        """Return the id, the type, the payload and the headers of each event, in the order of positions."""
        event = self.outbox.tables.event.c
        query = sa.select(event.aggregate_id, event.event_type, event.payload, event.headers)
        with self.engine.connect() as connection:
            found = connection.execute(query.where(event.destination == "search").order_by(event.position))
            return [(id_, type_, _plain(payload), _plain(headers)) for id_, type_, payload, headers in found]

    def ids(self) -> list[int]:
        """Return the ids of the documents that have events, in the order of positions."""
        return [int(id_) for id_, *_ in self.events()]

    def state(self) -> dict[str, Any]:
        """Return the documents that the database has."""
        with self.engine.connect() as connection:
            found = connection.execute(sa.select(Document.id, Document.title))
            return {str(id_): title for id_, title in found}

    def indexed(self) -> dict[str, Any]:
        """Return the documents that result from the events, applied in order."""
        state: dict[str, Any] = {}
        for id_, event_type, payload, _ in self.events():
            if event_type == "document.deleted":
                state.pop(id_, None)
            else:
                state[id_] = payload["title"]
        return state

    def operations(self) -> list[Any]:
        """Return the operations on record, oldest first."""
        table = self.outbox.tables.operation
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(table).order_by(table.c.id)))

    def emit(self, connection: sa.Connection, number: int, event: str, title: str) -> None:
        payload = {"id": number, "title": title}
        type_ = f"document.{event}"
        self.outbox.emit(connection, "Document", number, type_, payload, destinations=["search"])

    def change(self, connection: sa.Connection, number: int, title: str) -> None:
        """Change the row, then emit, as the application does."""
        changed = connection.execute(sa.update(Document).where(Document.id == number).values(title=title))
        if changed.rowcount:
            self.emit(connection, number, "updated", title)

    def writers(self, count: int, most: int) -> AbstractContextManager[None]:
        """Threads that change, remove and add documents until the end of the block."""
        return writing(count, partial(self._write, most))

    def _write(self, most: int, chance: random.Random, new: int) -> None:
        kind, number, title = chance.random(), chance.randint(1, most), f"{new}"
        with self.engine.begin() as connection:
            if kind < 0.1:
                if connection.execute(sa.delete(Document).where(Document.id == number)).rowcount:
                    self.emit(connection, number, "deleted", title)
            elif kind < 0.2:
                connection.execute(sa.insert(Document).values(id=new, title=title, author_id=1))
                self.emit(connection, new, "created", title)
            else:
                self.change(connection, number, title)


def _plain(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value


def _begin_as_writer(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 60000")

    @sa.event.listens_for(engine, "begin")
    def began(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def stop_after(pages: int) -> Callable[[], bool]:
    """Return what stops a backfill after so many pages."""
    asked = iter([False] * pages)
    return lambda: next(asked, True)


def repairs(found: Sequence[Item], missing: Sequence[str]) -> list[Call]:
    """Return the events of documents that differ, and of those that are no more."""
    to = ["search"]
    return [
        *(Call("Document", one.id, "document.updated", one.payload, destinations=to) for one in found),
        *(Call("Document", id_, "document.deleted", {}, destinations=to) for id_ in missing),
    ]


DOCUMENTS = Source(sa.select(Document))


def make_project(path: Path, archive: Archive) -> Project:
    made = Project(path)
    made.write("shop.py", APP)
    made.write("relaybox.toml", f'[relaybox]\ndatabase = "{archive.url}"\napp = "shop:outbox"\n')
    return made


def run(archive: Archive, source: Any = DOCUMENTS, **options: Any) -> Backfilled:
    async def bounded() -> Backfilled:
        async with asyncio.timeout(SECONDS):
            return await abackfill(archive.outbox, "search", source, **options)

    return asyncio.run(bounded())
