"""An archive whose documents are searched: it writes them and their events, relays elsewhere send them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from relaybox.search import Source, reconcile
from relaybox.search.results import Reconciled
from tests.chaos.drivers import engine
from tests.integration.project import COMMAND, Project

POLICY: dict[str, Any] = {
    "timeout": "3s",
    "lease": "4s",
    "poll_interval": "100ms",
    "backoff": {"base": "100ms", "cap": "500ms"},
    "max_attempts": 50,
}
"""An outage is over within seconds here, and so is the wait after it."""

documents = sa.Table(
    "documents",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("title", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)


class Archive:
    """Documents in a database, and a destination ``search`` that is to have the same."""

    def __init__(self, database: str, directory: Path, sink: str, auth: str | None, **policy: Any) -> None:
        settings = {**POLICY, **policy, **({"auth": auth} if auth else {})}
        self.outbox = Outbox(
            database,
            destinations=[Destination("search", sink, **settings)],
            routes=[Route("document.*", to="search")],
        )
        self.outbox.migrate()
        self.engine = engine(database, sa.QueuePool)
        documents.metadata.create_all(self.engine)
        self.project = Project(directory)
        self.project.write("relaybox.toml", _toml(database, sink, settings))
        self.source = Source(sa.select(documents), aggregate_type="Document", event_type="document.updated")

    def save(self, numbers: Sequence[int], text: str) -> None:
        """Write these documents, in one transaction with an event of each."""
        with self.engine.begin() as connection:
            known = set(connection.scalars(sa.select(documents.c.id).where(documents.c.id.in_(numbers))))
            for number in sorted(numbers):
                row = {"id": number, "title": f"{text} {number}", "body": text * 20}
                if number in known:
                    connection.execute(documents.update().where(documents.c.id == number), row)
                else:
                    connection.execute(documents.insert(), row)
                happened = "updated" if number in known else "created"
                self.outbox.emit(connection, "Document", number, f"document.{happened}", row)

    def delete(self, number: int) -> None:
        """Delete a document, if it is there."""
        with self.engine.begin() as connection:
            gone = connection.execute(documents.delete().where(documents.c.id == number))
            if gone.rowcount:
                self.outbox.emit(connection, "Document", number, "document.deleted", {})

    def churn(self, numbers: range, seed: int, steps: int) -> None:
        """Create, update and delete at random among these documents, which no other writer touches."""
        random = Random(seed)
        for step in range(steps):
            number = random.choice(numbers)
            if random.random() < 0.2:
                self.delete(number)
            else:
                self.save([number], f"state {seed}-{step} of")

    def count(self) -> int:
        """Return how many documents there are."""
        return self._count(sa.select(sa.func.count()).select_from(documents))

    def emitted(self) -> int:
        """Return how many events there were."""
        return self._count(sa.select(sa.func.count()).select_from(self.outbox.tables.event))

    def left(self) -> int:
        """Return how many events have not been delivered."""
        event = self.outbox.tables.event
        return self._count(sa.select(sa.func.count()).where(event.c.status != "delivered"))

    def failed(self) -> list[str]:
        """Why events have failed for good."""
        event = self.outbox.tables.event
        with self.engine.connect() as connection:
            query = sa.select(event.c.error_message).where(event.c.status == "failed")
            return list(connection.scalars(query))

    def attempted(self, said: str) -> list[str]:
        """Return the errors of attempts and destinations so far that contain this text."""
        tables = self.outbox.tables
        texts = [table.c.error_message for table in (tables.event, tables.attempt)]
        texts.append(tables.destination.c.circuit_reason)
        with self.engine.connect() as connection:
            found = [one for text in texts for one in connection.scalars(sa.select(text).distinct())]
        return [one for one in found if one is not None and said in one.lower()]

    def logs(self) -> str:
        """Return what the relays logged."""
        return "\n".join(path.read_text() for path in sorted(self.project.directory.glob("relay-*.log")))

    def troubles(self) -> str:
        """Return all errors and the end of the relays' logs, for the message of a test."""
        lines = [f"{self.left()} left", *self.failed()[:5], *self.attempted("")[-5:]]
        return "\n".join([*lines, self.logs()[-4000:]])

    def compare(self, **options: Any) -> Reconciled:
        """Compare the index with the database."""
        return reconcile(self.outbox, "search", self.source, **options)

    @contextmanager
    def relays(self, count: int = 1, command: Sequence[str] = COMMAND) -> Iterator[Relays]:
        """Relays in processes of their own, until the end of the block."""
        relays = Relays(self.project, count, command)
        try:
            yield relays
        finally:
            relays.close()

    def _count(self, query: sa.Select[tuple[int]]) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(query) or 0


class Relays:
    """Processes, of which any may be killed; another takes its place."""

    def __init__(self, project: Project, count: int, command: Sequence[str]) -> None:
        self._project = project
        self._command = command
        self._made = 0
        self._running = [self._start() for _ in range(count)]

    def kill(self, number: int) -> None:
        """Kill one, and start another."""
        at = number % len(self._running)
        self._running[at].kill()
        self._running[at].wait()
        self._running[at] = self._start()

    def close(self) -> None:
        """Kill them all."""
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._made += 1
        with (self._project.directory / f"relay-{self._made}.log").open("wb") as log:
            return subprocess.Popen(
                [*self._command, "relay"],
                cwd=self._project.directory,
                env=self._project.environment,
                stdout=log,
                stderr=log,
            )


def _toml(database: str, sink: str, settings: dict[str, Any]) -> str:
    said = "\n".join(f"{name} = {_value(value)}" for name, value in settings.items())
    return f"""[relaybox]
database = {json.dumps(database)}

[destinations.search]
sink = {json.dumps(sink)}
{said}

[[routes]]
events = ["document.*"]
to = ["search"]
"""


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)
