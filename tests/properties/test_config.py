"""Whatever is configured: settings, or a ``ConfigError`` that names the setting."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

from relaybox import Event
from relaybox.core.settings import Backoff, Destination, Route, Settings
from relaybox.errors import ConfigError
from relaybox.outbox import Outbox
from tests.properties import settings, toml
from tests.properties.conftest import Feed
from tests.properties.settings import DESTINATION, GENERAL, ROUTE
from tests.properties.values import HostileText
from tests.properties.volume import attempt, each


def test_settings_are_taken_or_refused_by_name(feed: Feed, tmp_path: Path) -> None:
    database = tmp_path / "outbox.db"
    Outbox(f"sqlite:///{database}").migrate()

    def configure(r: Random) -> None:
        if r.random() < 0.02:
            works(r, database)
        else:
            r.choice((destination, destination, route, general, backoff, lambda r: file(r, tmp_path)))(r)

    feed("configuration", each(configure), size=100)


def works(r: Random, database: Path) -> None:
    """Check that a relay can work with every value that is accepted."""
    table = {name: DESTINATION[name] for name in DESTINATION.keys() - {"sink", "dead_letter", "rate_limit"}}
    given, name = settings.one_wrong(r, {name: table[name] for name in sorted(table)})
    if callable(given.get("ordering")):
        # Somebody's own function may fail as it likes.
        return
    made = refused_by_name(lambda: Destination("runner", "handler:", **given), name)
    if made is None:
        return
    taken: list[UUID] = []

    async def take(event: Event) -> None:
        taken.append(event.id)

    outbox = Outbox(
        f"sqlite:///{database}",
        destinations=[made],
        routes=[Route("*", to="runner")],
        handlers={"runner": take},
    )
    with closing(sqlite3.connect(database)) as connection, connection:
        emitted = outbox.emit(connection, "Order", r.getrandbits(60), "order.paid", 1, tenant="t")
    outbox.drain()
    assert taken == [emitted.event_id], (name, given)


def destination(r: Random) -> None:
    given, name = settings.one_wrong(r, {**DESTINATION, "name": ("runner",)})
    if name in ("name", "sink") and isinstance(given[name], HostileText):
        return
    made = refused_by_name(lambda: Destination(**{"name": "runner", "sink": "console:", **given}), name)
    if made is not None:
        assert isinstance(made.timeout, float)
        assert repr(made.name) in repr(made)
        if name not in ("name", "sink"):
            refused_by_name(lambda: Destination.from_mapping("runner", {"sink": "console:", **given}), name)


def route(r: Random) -> None:
    given, name = settings.one_wrong(r, ROUTE)
    made = refused_by_name(lambda: Route(**{"events": "*", "to": "runner", **given}), name)
    assert made is None or all(isinstance(one, str) for one in (*made.events, *made.to))


def backoff(r: Random) -> None:
    given = settings.mutated(r, r.choice(DESTINATION["backoff"]))
    made = refused_by_name(lambda: Backoff.from_mapping(given), "backoff")
    assert made is None or 0 <= made.base <= made.cap


def general(r: Random) -> None:
    given, name = settings.one_wrong(r, GENERAL)
    if name != "database":
        given.pop("database", None)
    made = refused_by_name(lambda: Settings(**given), name)
    if made is not None and r.random() < 0.2:
        refused_by_name(lambda: Outbox(**{"database": "sqlite://", **given}), name)


def file(r: Random, directory: Path) -> None:
    text, name = toml.document(r)
    path = directory / r.choice(("relaybox.toml", "pyproject.toml"))
    if path.name == "pyproject.toml" and name is not None:
        text = text.replace("[destinations", "[tool.relaybox.destinations").replace(
            "[relaybox]", "[tool.relaybox]"
        )
        text = text.replace("[[routes]]", "[[tool.relaybox.routes]]")
    path.write_bytes(text.encode("utf-8", "surrogatepass") if r.random() < 0.95 else r.randbytes(20))
    made = refused_by_name(
        lambda: Settings.load(path, {"HOME": "sqlite://"}), name if path.read_bytes() else None
    )
    assert made is None or isinstance(made, Settings)


def refused_by_name(make: Callable[[], Any], name: str | None) -> Any:
    """Return what it makes, or None if it is refused by an error that names the setting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, error = attempt(make, ConfigError)
    if error is not None:
        assert 0 < len(str(error)) < 3_000
        assert name is None or name in str(error) or "TOML" in str(error), error
    return made
