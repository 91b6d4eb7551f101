"""How an ``Outbox`` comes by its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaybox import Destination, Outbox, Route
from relaybox.errors import ConfigError, UnknownSetting

TOML = """
[relaybox]
database = "sqlite:///from-file.db"
max_payload = "1KiB"

[destinations.runner]
sink = "https://runner.example/events"

[destinations.other]
sink = "memory:"

[[routes]]
events = "file.*"
to = "runner"
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RELAYBOX_DATABASE", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_what_is_given_is_all_there_is(directory: Path) -> None:
    (directory / "relaybox.toml").write_text(TOML)
    outbox = Outbox("postgres://host/db", destinations=[Destination("a", "memory:")], prefix="my_")
    assert outbox.settings.database == "postgresql://host/db"
    assert [destination.name for destination in outbox.settings.destinations] == ["a"]
    assert outbox.tables.event.name == "my_outbox_event"


def test_without_a_database_the_file_is_read_and_the_code_goes_before_it(directory: Path) -> None:
    (directory / "relaybox.toml").write_text(TOML)
    outbox = Outbox(
        destinations=[Destination("other", "console:"), Destination("mine", "memory:")],
        routes=[Route("order.*", to="mine")],
        schema="s",
    )
    assert outbox.settings.database == "sqlite:///from-file.db"
    assert outbox.settings.max_payload == 1024
    sinks = {destination.name: destination.sink for destination in outbox.settings.destinations}
    assert sinks == {"runner": "https://runner.example/events", "other": "console:", "mine": "memory:"}
    assert [route.to for route in outbox.settings.routes] == [("mine",), ("runner",)]
    assert outbox.tables.event.schema == "s"


def test_the_database_may_come_from_the_environment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Outbox().settings.database == "sqlite:///relaybox.db"
    monkeypatch.setenv("DATABASE_URL", "postgres://host/one")
    assert Outbox().settings.database == "postgresql://host/one"
    monkeypatch.setenv("ELSEWHERE", "mariadb://host/two")
    assert Outbox("env:ELSEWHERE").settings.database == "mysql://host/two"


def test_what_does_not_fit_is_refused(directory: Path) -> None:
    with pytest.raises(UnknownSetting, match="did you mean 'prefix'"):
        Outbox("sqlite://", prefxi="x")
    with pytest.raises(ConfigError, match="no destination is called"):
        Outbox("sqlite://", routes=[Route("a", to="b")])
    with pytest.raises(ConfigError, match="database"):
        Outbox("oracle://host/db")


@pytest.mark.parametrize("database", ["sqlite:///shop.db", None])
def test_one_destination_or_route_instead_of_a_list_is_named(
    database: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Destination("runner", "console:")
    with pytest.raises(ConfigError, match="destinations: give a list of Destination objects"):
        Outbox(database, destinations=runner)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="routes: give a list of Route objects"):
        Outbox(database, destinations=[runner], routes=Route("*", to="runner"))  # type: ignore[arg-type]
