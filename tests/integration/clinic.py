"""A set-up to make sick and well again: a database, a configuration, and the doctor that looks at them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from typer.testing import CliRunner

from relaybox import Destination, Outbox, Route
from relaybox.cli import app
from tests.databases import engine
from tests.schema_snapshot import run_script

CONSOLE = """
[relaybox]
unrouted = "store"
{more}
[destinations.runner]
sink = "console:"
{options}
[[routes]]
events = ["order.*"]
to = ["runner"]
"""


class Clinic:
    """A healthy set-up: one destination, a route to it, and tables with nothing in them."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.configure()
        self.outbox = Outbox(
            url,
            destinations=[Destination("runner", "console:", ordered=True), Destination("gone", "console:")],
            routes=[Route("order.*", to="runner")],
            unrouted="store",
            notify=False,
        )

    def configure(self, options: str = "", more: str = "", text: str | None = None) -> None:
        """Write the configuration."""
        made = CONSOLE.format(options=options, more=more)
        (self.directory / "relaybox.toml").write_text(made if text is None else text)

    def run(self, *arguments: str, status: int = 0) -> str:
        """Return what a command prints."""
        done = CliRunner().invoke(app, ["--database", self.url, *arguments])
        assert done.exit_code == status, (done.stdout, done.stderr, done.exception)
        return done.stderr if status == 2 else done.stdout

    def report(self, *arguments: str) -> dict[str, Any]:
        """Return the doctor's whole report."""
        done = CliRunner().invoke(app, ["--database", self.url, "doctor", "--json", *arguments])
        assert done.exit_code in (0, 1), (done.stdout, done.stderr, done.exception)
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["ok"] is (done.exit_code == 0)
        return document

    def findings(self, *arguments: str) -> list[dict[str, str]]:
        """Return what the doctor finds; check that it could examine everything."""
        document = self.report(*arguments)
        assert document["unseen"] == [], document["unseen"]
        found: list[dict[str, str]] = document["findings"]
        assert all(finding["fix"] and finding["title"] and finding["detail"] for finding in found)
        return found

    def only_finding(self, title: str, *arguments: str) -> dict[str, str]:
        """Return the only finding; it may keep others from being examined."""
        found: list[dict[str, str]] = self.report(*arguments)["findings"]
        assert len(found) == 1, found
        assert re.search(title, found[0]["title"]), found
        return found[0]

    def repair(self, title: str, *arguments: str) -> dict[str, str]:
        """Do what the only finding says; then there is none."""
        finding = self.only_finding(title, *arguments)
        self.apply(finding["fix"])
        assert self.findings(*arguments) == []
        return finding

    def apply(self, fix: str) -> None:
        """Do what a finding says: a command of ours, or SQL."""
        if fix.startswith("relaybox "):
            words = shlex.split(fix)[1:]
            self.run(*words, *(("--yes",) if words[0] in ("move", "retry", "discard") else ()))
        elif self.url.startswith("sqlite:"):
            run_script(self.url, fix)
        else:
            for statement in re.split(r";\n|;$", fix):
                if statement.strip():
                    self.sql(statement)

    def sql(self, statement: str) -> None:
        """Run one statement, in no transaction."""
        with engine(self.url).execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.exec_driver_sql(statement.replace("%", "%%"))

    def emit(self, event_type: str = "order.paid", **options: Any) -> None:
        """Commit an event."""
        with engine(self.url).begin() as connection:
            self.outbox.emit(connection, "Order", 1, event_type, {"total": 42}, **options)

    def change(self, **values: Any) -> None:
        """Edit every event."""
        with engine(self.url).begin() as connection:
            connection.execute(sa.update(self.outbox.tables.event).values(**values))
