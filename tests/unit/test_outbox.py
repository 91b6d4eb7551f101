"""How an Outbox comes by its settings, and the options of a destination."""

from __future__ import annotations

import copy
import pickle
import tomllib
from collections import UserDict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from relaybox import Destination, Outbox, Route
from relaybox.cli.config import effective_settings
from relaybox.cli.options import Options
from relaybox.core.values import parse_table
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
    with pytest.raises(ConfigError, match="no destination has this name"):
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


@pytest.mark.parametrize("given", [{"maxlen": 10, "tls": True}, UserDict({"maxlen": 10, "tls": True})])
def test_options_are_a_table_of_names_and_values(given: Any) -> None:
    options = Destination("shop", "memory:", options=given).options
    assert options == {"maxlen": 10, "tls": True}
    assert (list(options), len(options), options["maxlen"]) == (["maxlen", "tls"], 2, 10)
    assert "acks" not in options
    assert Destination("shop", "memory:").options == {}
    table = tomllib.loads('sink = "redis://one"\noptions = { maxlen = 10 }\n')
    assert Destination.from_mapping("shop", table).options == {"maxlen": 10}


def test_options_do_not_change_with_what_they_were_made_of_and_cannot_be_changed() -> None:
    given = {"maxlen": 10}
    options = Destination("shop", "memory:", options=given).options
    given["maxlen"] = 20
    assert options["maxlen"] == 10
    with pytest.raises(TypeError):
        options["maxlen"] = 30  # type: ignore[index]


@pytest.mark.parametrize(
    "given", [None, "maxlen=10", 7, ["maxlen"], [("maxlen", 10)], {1: 2}, {"a": 1, None: 2}]
)
def test_an_object_that_is_not_a_table_is_refused_with_an_example(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"destination 'shop': options = .*write a table such as") as raised:
        Destination("shop", "memory:", options=given)
    assert repr(given) in str(raised.value)


def test_a_destination_with_options_is_compared_hashed_and_copied_like_any_other() -> None:
    one = Destination("shop", "memory:", options={"servers": ["a", "b"]})
    same = Destination("shop", "memory:", options={"servers": ["a", "b"]})
    assert one == same
    assert hash(one) == hash(same)
    assert one != replace(one, options={"servers": ["a"]})
    assert replace(one, batch_size=7).options == one.options
    assert asdict(one)["options"] == one.options
    assert copy.deepcopy(one.options) == pickle.loads(pickle.dumps(one.options)) == one.options  # noqa: S301


def test_the_command_shows_the_names_of_options(tmp_path: Path) -> None:
    file = tmp_path / "relaybox.toml"
    file.write_text("""
        [destinations.plain]
        sink = "memory:"
        [destinations.shop]
        sink = "memory:"
        options = { token = "geheim", maxlen = 10 }
    """)
    tables = effective_settings(Options("sqlite:///shop.db", str(file)))
    shown = {"text": "{ token = …, maxlen = … }", "source": str(file)}
    assert tables["destinations.shop"]["options"] == shown
    assert tables["destinations.plain"]["options"] == {"text": "{}", "source": "default"}
    options = parse_table({"token": "geheim"}, "options")
    assert repr(options) == "Table(token)"
    assert "geheim" not in f"{options}"
