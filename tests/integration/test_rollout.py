"""Gradual rollout and shadow on real databases: emit, relay, replay, and a file that changes meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relaybox import Call, Destination, Event, Outbox, Retry, Route
from relaybox.cli import app
from relaybox.ledger import Filter
from relaybox.observers.metrics import MetricsObserver
from relaybox.routing import bucket
from tests.integration.receivers import answer, answering
from tests.integration.shop import DRIVERS, Shop

KINDS = ["postgresql-18", "mariadb", "sqlite"]
IDS = range(200)
IN, OUT = 2, 1


def below(percent: float) -> list[str]:
    return [str(n) for n in IDS if bucket(str(n)) < percent * 100]


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, fresh_database: Callable[[str], str]) -> str:
    return fresh_database(request.param)


@contextmanager
def shop(database: str, **options: Any) -> Iterator[Shop]:
    made = Shop(database, **options)
    try:
        yield made
    finally:
        made.engine.dispose()


def emit_all(shop: Shop) -> list[tuple[str, ...]]:
    calls = [Call("Document", n, "document.updated", {"n": n}) for n in IDS]
    with shop.engine.begin() as connection:
        return [one.destinations for one in shop.outbox.emit_many(connection, calls)]


def stored(shop: Shop, destination: str) -> list[str]:
    event = shop.outbox.tables.event.c
    query = sa.select(event.aggregate_id).where(event.destination == destination).order_by(event.position)
    with shop.engine.connect() as connection:
        return list(connection.scalars(query))


def test_the_events_of_a_share_are_delivered_and_the_others_are_nowhere(database: str) -> None:
    got: list[str] = []
    with shop(database) as documents:

        @documents.outbox.handler("document.*", name="search", ordered=True)
        def search(event: Event) -> None:
            got.append(event.aggregate_id)

        documents.outbox.rollout("search", 10)
        emitted = emit_all(documents)
        assert [str(n) for n, to in zip(IDS, emitted, strict=True) if to == ("search",)] == below(10)
        assert [n for n in IDS if documents.outbox.enabled("search", n)] == list(map(int, below(10)))
        assert stored(documents, "search") == below(10)
        assert documents.states() == {"pending": len(below(10))}
        documents.outbox.drain()
        assert sorted(got) == sorted(below(10))


def test_an_idempotency_key_is_taken_by_the_first_event_that_is_written(database: str) -> None:
    routes = [Route("document.*", to="search", rollout=10)]
    with shop(database, destinations=[Destination("search", "memory:")], routes=routes) as documents:

        def emit() -> tuple[bool, tuple[str, ...]]:
            with documents.engine.begin() as connection:
                one = documents.outbox.emit(
                    connection, "Document", OUT, "document.updated", {}, idempotency_key="once"
                )
            return one.duplicate, one.destinations

        assert emit() == (False, ())
        assert emit() == (False, ())
        documents.outbox.rollout("search", 100)
        assert emit() == (False, ("search",))
        assert emit() == (True, ())
        assert stored(documents, "search") == [str(OUT)]


async def test_what_is_in_shadow_is_delivered_without_being_sent_and_a_replay_is_sent(database: str) -> None:
    async with answering(answer("200 OK")) as receiver:
        search = Destination("search", receiver.url, allow=["127.0.0.0/8"], ordered=True)
        routes = [Route("document.*", to="search", shadow=True)]
        with shop(database, destinations=[search], routes=routes) as documents:
            outbox = documents.outbox
            assert not outbox.enabled("search", IN)
            emit_all(documents)
            metrics = MetricsObserver()
            await outbox.relay(observers=[metrics]).drain()
            assert (receiver.connections, documents.states()) == (0, {"delivered": len(IDS)})
            sample = metrics.registry.get_sample_value("outbox_shadowed_total", {"destination": "search"})
            assert sample == len(IDS)

            outbox.shadow("search", False)
            with documents.engine.begin() as connection:
                real = outbox.emit(connection, "Document", IN, "document.updated", {"n": -1})
            await outbox.adrain()
            assert [json.loads(request.body)["id"] for request in receiver.requests] == [str(real.event_id)]

            async with outbox.admin() as admin:
                [first, *_] = (await admin.events(Filter(aggregate_id=str(OUT)))).entries
                [reason] = await admin.why(first.id)
                assert reason.kind == "delivered"
                assert reason.text.startswith("was delivered in shadow at ")
                assert reason.text.endswith(": nothing was sent")
                [sent] = await admin.why(real.event_id)
                assert "shadow" not in sent.text
                assert (await admin.replay([first.id])).affected == 1
            await outbox.adrain()
            assert json.loads(receiver.requests[-1].body)["id"] == str(first.event_id)
            assert len(receiver.requests) == 2


def test_events_show_says_that_nothing_was_sent(database: str) -> None:
    routes = [Route("document.*", to="search", shadow=True)]
    with shop(database, destinations=[Destination("search", "memory:")], routes=routes) as documents:
        with documents.engine.begin() as connection:
            event = documents.outbox.emit(connection, "Document", 1, "document.updated", {})
        documents.outbox.drain()
    done = CliRunner().invoke(app, ["--database", database, "events", "show", str(event.event_id)])
    assert done.exit_code == 0, done.output
    assert " in shadow: nothing was sent" in done.stdout


def test_verify_misses_nothing_that_was_not_sent(database: str, tmp_path: Path) -> None:
    got: list[str] = []
    with shop(database) as documents:

        @documents.outbox.handler("document.*", name="search")
        def search(event: Event) -> None:
            got.append(str(event.id))

        for on in (True, False):
            documents.outbox.shadow("search", on)
            emit_all(documents)
        documents.outbox.drain()
        assert documents.states() == {"delivered": 2 * len(IDS)}
    assert len(got) == len(IDS)
    recorded = tmp_path / "got"
    recorded.write_text("".join(f"{event_id}\n" for event_id in got))
    arguments = ["--database", database, "verify", "search", str(recorded), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def test_order_holds_for_what_is_sent_with_shadows_between(database: str) -> None:
    got: list[int] = []
    with shop(database) as documents:

        @documents.outbox.handler("document.*", name="search", ordered=True, backoff={"base": "10ms"})
        def search(event: Event) -> None:
            got.append(event.payload["n"])
            if event.payload["n"] % 3 == 0 and event.attempt == 1:
                raise Retry("once more")

        for n in range(12):
            documents.outbox.shadow("search", n % 2 == 1)
            with documents.engine.begin() as connection:
                documents.outbox.emit(connection, "Document", IN, "document.updated", {"n": n})
        deadline = time.monotonic() + 30
        while documents.states() != {"delivered": 12}:
            assert time.monotonic() < deadline, documents.rows()
            documents.outbox.drain()
        assert got == [0, 0, 2, 4, 6, 6, 8, 10]


FILE = """
[relaybox]
database = "{database}"
unrouted = "store"
[destinations.search]
sink = "memory:"
[[routes]]
events = "document.*"
to = "search"
rollout = {rollout}
shadow = {shadow}
"""


def write(directory: Path, database: str, rollout: Any = 100, shadow: str = "false") -> None:
    text = FILE.format(database=database, rollout=rollout, shadow=shadow)
    (directory / "relaybox.toml").write_text(text)


def test_stored_events_are_given_to_a_route_when_it_sends_them(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop(database, unrouted="store") as before:
        emit_all(before)
        assert stored(before, "") == [str(n) for n in IDS]
        monkeypatch.chdir(tmp_path)
        write(tmp_path, database, 10)
        outbox = Outbox()
        outbox.drain()
        assert stored(before, "search") == below(10)
        write(tmp_path, database, 50)
        deadline = time.monotonic() + 20
        # In any order: the file may be seen in the middle of a pass.
        while set(stored(before, "search")) != set(below(50)):
            assert time.monotonic() < deadline, "the relay's router has not seen the file"
            outbox.drain()
        assert len(stored(before, "")) == len(IDS) - len(below(50)), "the others wait"


PROGRAM = """
import json, sys
import sqlalchemy as sa
from relaybox import Outbox

outbox = Outbox()
engine = sa.create_engine(sys.argv[1])
for line in sys.stdin:
    with engine.begin() as connection:
        emitted = outbox.emit(connection, "Document", line.strip(), "document.updated", {})
    print(json.dumps([list(emitted.destinations), outbox.enabled("search", line.strip())]), flush=True)
"""


class Emitting:
    """A process that emits for each aggregate it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def emit(self, aggregate_id: object) -> tuple[bool, bool]:
        """Whether it was written, and whether it was said to be enabled."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{aggregate_id}\n")
        self._process.stdin.flush()
        destinations, enabled = json.loads(self._process.stdout.readline())
        return bool(destinations), enabled

    def until(self, aggregate_id: object, expected: tuple[bool, bool]) -> None:
        deadline = time.monotonic() + 20
        while (seen := self.emit(aggregate_id)) != expected:
            assert time.monotonic() < deadline, f"still {seen}"

    def until_told(self, log: Path, text: str) -> None:
        """It looks at its file when it emits."""
        deadline = time.monotonic() + 20
        while text not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            self.emit(OUT)


@pytest.mark.parametrize("kind", ["postgresql-18", "sqlite"])
def test_a_running_process_takes_a_changed_file_over(
    kind: str, tmp_path: Path, fresh_database: Callable[[str], str]
) -> None:
    database = fresh_database(kind)
    with shop(database):
        write(tmp_path, database, 10)
    url = sa.make_url(database)
    driver = url.set(drivername=DRIVERS[url.drivername]).render_as_string(hide_password=False)
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, driver],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        emitting = Emitting(process)
        assert emitting.emit(IN) == (True, True)
        assert emitting.emit(OUT) == (False, False)
        write(tmp_path, database, 100)
        emitting.until(OUT, (True, True))
        write(tmp_path, database, 100, "true")
        emitting.until(OUT, (True, False))
        write(tmp_path, database, '"broken"')
        emitting.until_told(tmp_path / "log", "rollout = 'broken': write a percentage")
        (tmp_path / "relaybox.toml").unlink()
        emitting.until_told(tmp_path / "log", "relaybox.toml: No such file")
        assert emitting.emit(OUT) == (True, False), "the last good values stay"
        write(tmp_path, database, 0)
        emitting.until(IN, (False, False))


@pytest.mark.parametrize("value", ["-1", "101", '"ten"', "true", "33.333"])
def test_config_check_names_what_is_wrong(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sqlite:///outbox.db", value)
    done = CliRunner().invoke(app, ["config", "check"])
    assert done.exit_code == 2
    assert "route 'document.*': rollout = " in done.stderr
    assert "write a percentage, 0 to 100" in done.stderr


def test_config_show_tells_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sqlite:///outbox.db", 12.5)
    done = CliRunner().invoke(app, ["config", "show"])
    assert "rollout = 12.5" in done.stdout
    assert "shadow" not in done.stdout
