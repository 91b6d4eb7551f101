"""Whatever is typed: the status 0, 1 or 2, and never a traceback."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from uuid import UUID, uuid4

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from relaybox.cli import app
from tests.integration.operated import CONFIGURATION, Operated
from tests.properties import values
from tests.properties.conftest import Database, Feed

COMMAND = get_command(app)
FILTER = ("--status", "--destination", "--type", "--aggregate-type", "--aggregate-id", "--key", "--event")
FILTER += ("--since", "--until", "--error")
ACT = (*FILTER, "--all", "--dry-run", "--yes", "--json")
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("status",): ("--json",),
    ("why",): ("--json",),
    ("events", "list"): (*FILTER, "--limit", "--cursor", "--json"),
    ("events", "show"): ("--json",),
    ("retry",): ACT,
    ("replay",): (*ACT, "--to"),
    ("discard",): ACT,
    ("move",): ("--dry-run", "--yes", "--json"),
    ("pause",): ("--reason", "--until", "--json"),
    ("resume",): ("--json",),
    ("debezium",): ("--sql",),
    ("doctor",): ("--only", "--skip", "--json"),
    ("top",): ("--interval", "--once"),
    ("config", "show"): ("--all", "--json"),
    ("config", "check"): ("--json",),
    ("drain",): ("--patience", "--json"),
    ("prune",): ("--json",),
    ("sql",): ("--dialect", "--grants", "--schema", "--prefix"),
    ("migrate",): ("--schema", "--prefix"),
    (): ("--version", "--help", "--database", "--config", "--app"),
}
"""All that end by themselves, with their options."""

NAMELESS = [(name,) for name in ("status", "list", "check", "drain", "prune", "sql", "migrate")]
GLOBAL = ("--database", "--config", "--app", "--help", "--nonsense", "-y", "--", "-", "--json=1", "--yes=no")
FLAGS = ("--all", "--dry-run", "--yes", "--json", "--version", "--help", "--grants")
MOMENTS = (
    *("1h", "-1h", "0s", "1e9d", "999999999d", "36500d", "now", "0001-01-01", "9999-12-31T23:59:59"),
    "2024-02-30",
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2024-01-01T00:00:00Z", "2024-W01-1"),
    *("\u0661s", ""),
)
LIKELY: dict[str, tuple[str, ...]] = {
    "--since": MOMENTS,
    "--until": MOMENTS,
    "--patience": MOMENTS,
    "--status": ("pending", "due", "scheduled", "parked", "sending", "delivered", "failed", "discarded"),
    "--destination": ("mail", "shop", "web", "gone", "spare"),
    "--to": ("mail", "shop", "web", "gone"),
    "--interval": MOMENTS,
    "--only": ("schema", "clock", "relays", "rows"),
    "--skip": ("sinks", "listener"),
    "--limit": ("1", "10000", "0"),
    "--dialect": ("postgresql", "sqlite", "mariadb"),
}
WORDS = (
    *("", " ", "mail", "shop", "gone", "nowhere", "failed", "pending", "sending", "Order", "order.paid"),
    *("0", "-1", "50"),
    *("10000", "99999999999999999999", "nan", "json", "postgresql", "sqlite", "mariadb", "sqlite://"),
    "sqlite:///x.db",
    *("postgresql://127.0.0.1:1/x", "postgresql://h:x/y", "env:NOWHERE", "file:/nowhere", "relaybox.toml"),
    *("/", "/dev/null"),
    *("no_such_module:x", "json:dumps", "os:environ", "::", "%", "'; DROP TABLE outbox_event; --"),
    *("a" * 3000, "\udc80"),
)


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_database: Database) -> list[UUID]:
    """Events in every state, in the database that the commands use."""
    url = fresh_database("sqlite")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("RELAYBOX_DATABASE", url)
    Path("relaybox.toml").write_text(CONFIGURATION)
    # Otherwise the whole command would be put together for each call.
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMAND)
    return asyncio.run(_fill(Operated(url)))


async def _fill(outbox: Operated) -> list[UUID]:
    found = [outbox.emit("mail")]
    await outbox.fail("mail")
    found += [outbox.emit("web", aggregate_id="é\n"), outbox.emit("gone", payload=b"bytes")]
    await outbox.deliver("web")
    found += [outbox.emit("shop", aggregate_id=7) for _ in range(3)]
    await outbox.back_off("shop")
    found += [outbox.emit("mail", "web"), outbox.emit()]
    found.append(outbox.emit("web", deliver_at=datetime.now(UTC) + timedelta(days=9)))
    await outbox.close()
    return found


def test_a_command_ends_with_a_status_and_no_traceback(feed: Feed, ids: list[UUID]) -> None:
    def batch(r: Random, size: int) -> None:
        for _ in range(size):
            arguments = typed(r, ids)
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code in (0, 1, 2), (arguments, done.exception)
            assert done.exception is None or isinstance(done.exception, SystemExit), (
                arguments,
                done.exception,
            )
            assert "Traceback" not in done.stderr, arguments
            assert done.exit_code != 2 or done.stderr or done.stdout, arguments

    feed("command line", batch, size=25)


def typed(r: Random, ids: list[UUID]) -> list[str]:
    """Return the words of a command."""
    command = r.choice(list(COMMANDS))
    named = command[-1:] not in NAMELESS or r.random() < 0.1
    words = [_word(r, ids) for _ in range(r.choice((0, 1, 1, 1, 2)) if named else 0)]
    for _ in range(r.choice((0, 1, 1, 2, 4))):
        option = r.choice(COMMANDS[command]) if r.random() < 0.95 else r.choice(GLOBAL)
        value = r.choice(LIKELY[option]) if option in LIKELY and r.random() < 0.8 else _word(r, ids)
        words += [option] if option in FLAGS or r.random() < 0.05 else [option, value]
    if r.random() < 0.1:
        r.shuffle(words)
    return [*command, *words]


def _word(r: Random, ids: list[UUID]) -> str:
    draw = r.random()
    if draw < 0.4:
        return str(r.choice(ids))
    if draw < 0.5:
        return r.choice(
            (str(uuid4()), str(r.choice(ids))[:-1], r.choice(ids).hex.upper(), "{" + str(uuid4()) + "}")
        )
    return r.choice(WORDS) if draw < 0.85 else values.text(r)
