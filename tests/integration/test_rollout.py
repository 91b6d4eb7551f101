"""Gradual rollout and shadow on real databases: emit, relay, replay, and a file that changes meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Call, Destination, Event, Outbox, Retry, Route
from relaybox.core.routing import bucket
from relaybox.operate.metrics import MetricsObserver
from relaybox.stores.ledger import Filter
from tests.databases import KINDS, sync_url
from tests.integration.operated import relaybox
from tests.integration.receivers import answer, answering
from tests.integration.shop import Shop
from tests.waiting import wait_for

IDS = range(200)
IN, OUT = 2, 1


def below(percent: float) -> list[str]:
    return [str(n) for n in IDS if bucket(str(n)) < percent * 100]


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, migrated_database: Callable[[str], str]) -> str:
    return migrated_database(request.param)


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
    documents = Shop(database)

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
    documents = Shop(database, destinations=[Destination("search", "memory:")], routes=routes)

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
        documents = Shop(database, destinations=[search], routes=routes)
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
    documents = Shop(database, destinations=[Destination("search", "memory:")], routes=routes)
    with documents.engine.begin() as connection:
        event = documents.outbox.emit(connection, "Document", 1, "document.updated", {})
    documents.outbox.drain()
    shown = relaybox("--database", database, "events", "show", event.event_id)
    assert " in shadow: nothing was sent" in shown


def test_verify_misses_nothing_that_was_not_sent(database: str, tmp_path: Path) -> None:
    got: list[str] = []
    documents = Shop(database)

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
    assert json.loads(relaybox("--database", database, "verify", "search", recorded, "--json"))["ok"]


def test_order_holds_for_what_is_sent_with_shadows_between(database: str) -> None:
    got: list[int] = []
    documents = Shop(database)

    @documents.outbox.handler("document.*", name="search", ordered=True, backoff={"base": "10ms"})
    def search(event: Event) -> None:
        got.append(event.payload["n"])
        if event.payload["n"] % 3 == 0 and event.attempt == 1:
            raise Retry("once more")

    for n in range(12):
        documents.outbox.shadow("search", n % 2 == 1)
        with documents.engine.begin() as connection:
            documents.outbox.emit(connection, "Document", IN, "document.updated", {"n": n})

    def all_are_delivered() -> bool:
        documents.outbox.drain()
        return documents.states() == {"delivered": 12}

    wait_for(all_are_delivered, lambda: str(documents.rows()))
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
    before = Shop(database, unrouted="store")
    emit_all(before)
    assert stored(before, "") == [str(n) for n in IDS]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, database, 10)
    outbox = Outbox()
    outbox.drain()
    assert stored(before, "search") == below(10)
    write(tmp_path, database, 50)

    def routed() -> bool:
        outbox.drain()
        # In any order: the file may be seen in the middle of a pass.
        return set(stored(before, "search")) == set(below(50))

    wait_for(routed, "the relay's router has seen the file")
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
    """A process that emits for each aggregate it reads from its input."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def emit(self, aggregate_id: object) -> tuple[bool, bool]:
        """Return two flags: the event was written, and it was said to be enabled."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{aggregate_id}\n")
        self._process.stdin.flush()
        destinations, enabled = json.loads(self._process.stdout.readline())
        return bool(destinations), enabled

    def until(self, aggregate_id: object, expected: tuple[bool, bool]) -> None:
        wait_for(lambda: self.emit(aggregate_id) == expected, f"{aggregate_id} is {expected}")

    def until_logged(self, log: Path, text: str) -> None:
        """Emit until the text is logged: the process looks at its file when it emits."""
        wait_for(lambda: self.emit(OUT) and text in log.read_text(), log.read_text)


@pytest.mark.parametrize("database", ["postgresql-18", "sqlite"], indirect=True)
@pytest.mark.full
def test_a_running_process_takes_a_changed_file_over(database: str, tmp_path: Path) -> None:
    write(tmp_path, database, 10)
    driver = sync_url(database).render_as_string(hide_password=False)
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
        emitting.until_logged(tmp_path / "log", "rollout = 'broken': write a percentage")
        (tmp_path / "relaybox.toml").unlink()
        emitting.until_logged(tmp_path / "log", "relaybox.toml: No such file")
        assert emitting.emit(OUT) == (True, False), "the last good values stay"
        write(tmp_path, database, 0)
        emitting.until(IN, (False, False))


@pytest.mark.parametrize("value", ["-1", "101", '"ten"', "true", "33.333"])
def test_config_check_names_the_fault(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sqlite:///outbox.db", value)
    complaint = relaybox("config", "check", status=2)
    assert "route 'document.*': rollout = " in complaint
    assert "write a percentage, 0 to 100" in complaint


def test_config_show_tells_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sqlite:///outbox.db", 12.5)
    shown = relaybox("config", "show")
    assert "rollout = 12.5" in shown
    assert "shadow" not in shown
