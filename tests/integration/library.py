"""An application that keeps its documents in a table, and a search index in step with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from typer.testing import CliRunner

from relaybox import Destination, Outbox, Route
from relaybox.cli import app
from relaybox.core.outcome import Delivered
from relaybox.search.engine import Change, Engine, open_engine
from relaybox.search.source import Source
from tests.databases import engine
from tests.servers import meilisearch

T = TypeVar("T")
Command = Callable[..., tuple[int, str]]
CONFIGURATION = """
[relaybox]
database = "{database}"

[destinations.search]
sink = "{sink}"
poll_interval = "50ms"
backoff = {{ base = "50ms", cap = "200ms" }}
max_attempts = 100

[[routes]]
events = "document.*"
to = "search"
"""


class Base(DeclarativeBase):
    """The tables of the application."""


class Document(Base):
    """What is searched for."""

    __tablename__ = "document"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(sa.String(200))
    pages: Mapped[int] = mapped_column(default=1)


def crooked(document: Document) -> dict[str, Any]:
    """Return a document; if its id is negative, the document has another id."""
    return {"id": max(0, document.id), "title": document.title, "pages": document.pages}


def broken(document: Document) -> dict[str, Any]:
    """Return a document; if it has thirteen pages, it has a value that JSON does not know."""
    return {"id": document.id, "pages": float("nan") if document.pages == 13 else document.pages}


DOCUMENT = sa.Table("document", Base.metadata, extend_existing=True)
SOURCE = Source(sa.select(Document))
NOTHING = Source(sa.select(Document).where(Document.id < -1000))
CROOKED = Source(sa.select(Document), document=crooked)
BROKEN = Source(sa.select(Document), document=broken)


class Library:
    """The application, with an index of its own in the engine at ``url``.

    ``path`` is what the destination calls the index, where that is another name.
    """

    def __init__(self, database: str, url: str, path: str = "", **options: Any) -> None:
        self.index = f"documents_{uuid4().hex[:8]}"
        address, mark, query = url.partition("?")
        sink = f"{address.rstrip('/')}/{path or self.index}{mark}{query}"
        self.destination = Destination(
            "search", sink, **{"backoff": {"base": 0.05, "cap": 0.2}, "poll_interval": 0.05, **options}
        )
        routes = [Route("document.*", to="search")]
        self.outbox = Outbox(database, destinations=[self.destination], routes=routes)
        self.database = engine(database)
        Base.metadata.create_all(self.database)
        self.ask(lambda engine: engine.create(self.index))

    def configuration(self) -> str:
        """Return the same settings, as the file has them."""
        return CONFIGURATION.format(database=self.outbox.settings.database, sink=self.destination.sink)

    def add(self, ids: Iterable[int], title: str = "a title") -> None:
        """Documents, each with its event, in one transaction."""
        rows = [{"id": id_, "title": f"{title} {id_}", "pages": 1} for id_ in ids]
        with self.database.begin() as connection:
            connection.execute(sa.insert(DOCUMENT), rows)
            for row in rows:
                self.outbox.emit(connection, "Document", row["id"], "document.created", row)

    def fill(self, ids: Iterable[int], title: str = "a title") -> None:
        """Add documents that are in the index too."""
        self.add(ids, title)
        self.outbox.drain()

    def change(self, id_: int, **values: Any) -> bool:
        """Another state of a document, and its event; whether there was such a document."""
        with self.database.begin() as connection:
            connection.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == id_).values(values))
            row = connection.execute(sa.select(DOCUMENT).where(DOCUMENT.c.id == id_)).mappings().first()
            if row is not None:
                self.outbox.emit(connection, "Document", id_, "document.updated", dict(row))
        return row is not None

    def remove(self, id_: int) -> None:
        """Delete a document and emit its event."""
        with self.database.begin() as connection:
            connection.execute(sa.delete(DOCUMENT).where(DOCUMENT.c.id == id_))
            self.outbox.emit(connection, "Document", id_, "document.deleted", {"id": id_})

    def execute(self, statement: Any) -> Any:
        """Behind the back of the application: no event tells of it."""
        with self.database.begin() as connection:
            result = connection.execute(statement)
            return result.all() if result.returns_rows else result.rowcount

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return what the table has."""
        found = self.execute(sa.select(DOCUMENT))
        return {str(row.id): dict(row._mapping) for row in found}

    def ask(self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """Return what the engine answers."""

        async def main() -> T:
            engine = open_engine(self.destination)
            try:
                return await question(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    def write(self, *changes: tuple[str, dict[str, Any] | None]) -> None:
        """Into the index, past the outbox."""
        event = self.outbox.tables.event
        [[newest]] = self.execute(sa.select(sa.func.coalesce(sa.func.max(event.c.position), 1)))
        made = [Change(id_, document, newest) for id_, document in changes]
        answers = self.ask(lambda engine: engine.write(self.index, made))
        assert all(isinstance(answer, Delivered) for answer in answers), answers

    def indexed(self) -> dict[str, Any]:
        """Return what the index has."""

        async def read(engine: Engine) -> dict[str, Any]:
            await engine.refresh(self.index)
            pages = [list(page) async for page in engine.scan(self.index)]
            found: dict[str, Any] = {}
            for page in pages:
                found |= await engine.get(self.index, page)
            return found

        return self.ask(read)

    def present(self) -> set[str]:
        """Which of the index and the one that is being built exist."""
        names = [self.index, f"{self.index}__building"]
        return set(self.ask(lambda engine: engine.present(names)))

    def statuses(self) -> list[str]:
        """Return the statuses of the deliveries, in their order."""
        event = self.outbox.tables.event
        return [row.status for row in self.execute(sa.select(event.c.status).order_by(event.c.position))]

    def emit_bad(self, id_: int) -> UUID:
        """Emit an event that fails, because it has no document."""
        with self.database.begin() as connection:
            return self.outbox.emit(connection, "Document", id_, "document.updated", "no document").event_id


def key_in_url(server: meilisearch.Server) -> str:
    """Return the URL of a server, with its key."""
    return meilisearch.destination_url(server).replace("://", f"://:{server.key}@")


def command_of(library: Library, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return what runs a command about the index in this process: its status, and what it says."""
    (directory / "relaybox.toml").write_text(library.configuration())
    monkeypatch.chdir(directory)
    for name in ("DATABASE_URL", "RELAYBOX_DATABASE", "RELAYBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str, *arguments: str, source: str = "SOURCE") -> tuple[int, str]:
        words = [name, "--destination", "search", "--source", f"tests.integration.library:{source}"]
        done = CliRunner().invoke(app, [*words, *arguments])
        return done.exit_code, done.output

    return run
