"""Which aggregates a route takes, what is in shadow, and how both change while a process runs."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from relaybox import Call, Destination, Emitted, Event, Outbox, Route
from relaybox.core.event import Status
from relaybox.core.outcome import Delivered, Unavailable
from relaybox.core.rollout import RouteFile, is_shadow, mark
from relaybox.core.routing import Routes, bucket
from relaybox.core.settings import Settings
from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import INSERTED, Statements
from relaybox.emit.row import RowBuilder
from relaybox.emit.write import write
from relaybox.errors import ConfigError, InvalidField, Unrouted
from relaybox.operate.metrics import MetricsObserver
from relaybox.operate.observers.log import LogObserver
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observers
from relaybox.relay.upkeep.route import StoredRouter
from relaybox.stores.memory import MemoryStore
from relaybox.stores.store import Settlement
from relaybox.stores.upkeep import StoredEvent
from tests.unit import lanes
from tests.unit.deliveries import make
from tests.unit.lanes import insert, open_circuit, running, shared, statuses
from tests.waiting import await_for, wait_for

IN, OUT = "2", "1"
"""Aggregates whose buckets are 554 and 9619."""
PLACES = [Destination("search", "memory:"), Destination("mail", "memory:")]
PERCENT = st.integers(0, 10_000).map(lambda hundredths: hundredths / 100)
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)


def test_a_bucket_is_the_same_in_every_process_and_release() -> None:
    buckets = {"1": 9619, "2": 554, "4": 7, "42": 6628, "55": 9997, "document-17": 6294, "Größe": 9760}
    buckets |= {"7ffb3a52-7c1e-4a6a-9f6e-0d4a35c1e2aa": 7475, "a" * 255: 8126}
    assert {one: bucket(one) for one in buckets} == buckets


def takes(percent: float) -> Callable[[str], bool]:
    """Which aggregates a route of this rollout takes."""
    routes = Routes([Route("document.*", to="search", rollout=percent)])
    return lambda aggregate_id: bool(routes.narrow("document.created", aggregate_id).destinations)


@given(IDS, PERCENT, PERCENT)
def test_raising_a_rollout_drops_nobody(aggregate_id: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert takes(more)(aggregate_id) or not takes(less)(aggregate_id)
    assert takes(100)(aggregate_id)
    assert not takes(0)(aggregate_id)


@pytest.mark.parametrize("percent", [0.01, 0.5, 1, 10, 33.33, 50, 90, 99.99])
@pytest.mark.parametrize("kind", [str, lambda n: str(UUID(int=n * 7919)), "document-{}".format])
def test_the_share_is_near_the_percentage(percent: float, kind: Callable[[int], str]) -> None:
    many = 5_000
    share = sum(map(takes(percent), map(kind, range(many)))) / many
    part = percent / 100
    assert abs(share - part) <= 5 * (part * (1 - part) / many) ** 0.5


def test_an_aggregate_is_in_if_any_route_takes_it_and_sent_if_a_route_without_shadow_does() -> None:
    routes = Routes(
        [
            Route("document.*", to=["search", "mail"], rollout=10),
            Route("document.created", to="search", rollout=50, shadow=True),
            Route("*.created", to="mail", shadow=True),
        ]
    )
    assert routes.narrow("document.created", IN) == (("search", "mail"), ())
    assert 1000 < bucket("0") < 5000
    assert routes.narrow("document.created", "0") == (("search", "mail"), ("search", "mail"))
    assert routes.narrow("document.created", OUT) == (("mail",), ("mail",))
    assert routes.narrow("document.deleted", OUT) == ((), ())
    assert not Routes([Route("a", to="b")]).gradual


def build(call: Call, *routes: Route, **options: Any) -> list[dict[str, Any]]:
    emission = RowBuilder(Settings(destinations=PLACES, routes=routes, **options)).build(call, POSTGRESQL)
    assert emission.destinations == tuple(row[2] for row in emission.rows)
    return [dict(zip(INSERTED, row, strict=True)) for row in emission.rows]


def test_an_event_outside_of_a_rollout_makes_no_row_and_no_error() -> None:
    route = Route("document.*", to="search", rollout=10)
    [row] = build(Call("Document", IN, "document.created", {}), route)
    assert row["headers"] == "{}"
    assert build(Call("Document", int(OUT), "document.created", {}), route, unrouted="store") == []
    assert build(Call("Document", OUT, "document.created", {}), route) == []
    both = build(Call("Document", OUT, "document.created", {}), route, Route("*", to="mail"))
    assert [row["destination"] for row in both] == ["mail"]
    with pytest.raises(Unrouted):
        build(Call("Document", OUT, "order.paid", {}), route)
    [stored] = build(Call("Document", OUT, "order.paid", {}), route, unrouted="store")
    assert stored["destination"] == ""
    route = Route("document.*", to="search", rollout=0, shadow=True)
    [row] = build(Call("Document", OUT, "document.created", {}, destinations=["search"]), route)
    assert (row["destination"], row["headers"]) == ("search", "{}"), "what is named is no matter of routes"


def test_a_key_of_an_event_that_nobody_gets_is_not_taken() -> None:
    outbox = Outbox("postgresql://", destinations=PLACES, routes=[Route("*", to="search", rollout=10)])
    builder = RowBuilder(outbox.settings)
    emission = builder.build(Call("Document", OUT, "document.created", {}, "once"), POSTGRESQL)
    writing = write([emission], Statements(outbox.tables, POSTGRESQL, "format"), POSTGRESQL)
    with pytest.raises(StopIteration) as done:
        next(writing)
    assert done.value.value == [Emitted(emission.event_id, False, ())]


@pytest.mark.parametrize("headers", [None, {"a": '"relaybox-shadow"'}, {"note": "relaybox-shadow", "é": [1]}])
def test_what_is_in_shadow_is_marked_at_its_own_destination_only(headers: dict[str, Any] | None) -> None:
    call = Call("Document", IN, "document.created", {}, headers=headers)
    search, mail = build(call, Route("*", to="search", shadow=True), Route("*", to="mail"))
    assert is_shadow(search["headers"])
    assert json.loads(search["headers"]) == {**(headers or {}), "relaybox-shadow": True}
    assert not is_shadow(mail["headers"])
    assert json.loads(mail["headers"]) == (headers or {})


@pytest.mark.parametrize(
    "text", ["", "[]", '["relaybox-shadow"]', '{"relaybox-shadow":false}', '{"relaybox-shadow"']
)
def test_what_has_no_mark_is_sent(text: str) -> None:
    assert not is_shadow(text)


@pytest.mark.parametrize("value", [-1, 101, 100.01, 0.001, 33.333, "ten", "10", True, None, float("nan")])
def test_a_rollout_that_is_not_a_percentage_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"route 'document\.\*': rollout = .*write a percentage, 0 to 100"):
        Route("document.*", to="search", rollout=value)


def test_a_shadow_that_is_not_a_flag_is_refused() -> None:
    for value in (0, 1, "yes", None):
        with pytest.raises(ConfigError, match=r"route 'document\.\*': shadow = .*write true or false"):
            Route("document.*", to="search", shadow=value)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"route '\*': shadow = True: Debezium sends every event that is written"
    ):
        Settings(destinations=[Destination("log", "debezium:")], routes=[Route("*", to="log", shadow=True)])


@pytest.mark.parametrize("value", [0, 100, 0.01, 12.34, 33.33, 99.99, 0.29])
def test_a_percentage_of_two_decimals_is_kept(value: float) -> None:
    route = Route.from_mapping({"events": "a", "to": "b", "rollout": value, "shadow": True})
    assert (route.rollout, route.shadow) == (value, True)


DOCUMENTS = Route("document.*", to="search", rollout=10)


def outbox(*routes: Route) -> Outbox:
    return Outbox("sqlite://", destinations=PLACES, routes=routes or [DOCUMENTS])


@pytest.mark.parametrize(
    "route", [DOCUMENTS, "document.*", "search", "document.created", "document.created.v2"]
)
def test_enabled_is_what_emit_would_send(route: Route | str) -> None:
    box = outbox()
    assert box.enabled(route, IN)
    assert box.enabled(route, int(IN))
    assert not box.enabled(route, OUT)
    box.shadow("search", True)
    assert not box.enabled(route, IN), "the old way is still needed"
    box.shadow(DOCUMENTS, False)
    box.rollout("document.*", 100)
    assert box.enabled(route, OUT)


def test_enabled_needs_every_route_and_destination_that_is_named() -> None:
    box = outbox(
        DOCUMENTS, Route("document.*", to="mail"), Route(["user.*", "document.created"], to="search")
    )
    assert not box.enabled("document.*", OUT)
    assert not box.enabled("search", OUT), "not what the first route takes"
    assert box.enabled("mail", OUT)
    assert box.enabled("document.created", OUT), "the third route sends what the first does not"
    assert not box.enabled("document.deleted", OUT)


def test_an_unknown_name_is_reported_with_the_name_that_is_meant() -> None:
    box = outbox()
    with pytest.raises(ConfigError, match=r"route = 'serch': .* did you mean 'search'\?"):
        box.enabled("serch", 1)
    with pytest.raises(ConfigError, match=r"known: document\.\* to search"):
        box.enabled(Route("document.*", to="mail"), 1)
    with pytest.raises(ConfigError, match="route = 7: give a Route"):
        box.enabled(7, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean"):
        box.rollout("document.created", 20)
    with pytest.raises(ConfigError, match="rollout = 120"):
        box.rollout("search", 120)
    with pytest.raises(InvalidField, match="aggregate_id"):
        box.enabled("search", None)
    assert box.settings.routes == (DOCUMENTS,), "nothing was changed"


def test_routes_change_from_several_threads_and_none_is_lost() -> None:
    routes = [Route(f"type{n}.*", to="search", rollout=0) for n in range(8)]
    box = outbox(*routes)

    def change(route: Route) -> None:
        for percent in range(1, 51):
            box.rollout(route, percent)

    threads = [threading.Thread(target=change, args=[route]) for route in routes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [route.rollout for route in box.settings.routes] == [50.0] * 8


def waiting(aggregate_id: str) -> StoredEvent:
    about = ("Document", aggregate_id, "document.created", "{}", None, None, "{}", None)
    return StoredEvent(uuid4(), *about, str(uuid4()), 5, False)


def test_the_router_of_stored_events_leaves_those_that_would_not_be_sent() -> None:
    box = outbox(DOCUMENTS, Route("document.*", to="mail", rollout=0))
    router = StoredRouter(box.settings, lambda: box.settings.routes)
    assert [target.destination for target in router.targets(waiting(IN))] == ["search"]
    assert router.takes("document.created")
    assert router.targets(waiting(OUT)) == []
    box.shadow("search", True)
    assert router.targets(waiting(IN)) == [], "it waits until it is sent"
    box.shadow("search", False)
    box.rollout("search", 100)

    @box.handler("document.*", name="late")
    def late(event: Event) -> None:
        raise AssertionError("there was no lane for it when the relay began")

    assert [target.destination for target in router.targets(waiting(OUT))] == ["search"]


class Watched:
    """A file of routes, and what was taken of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.taken: list[Mapping[int, Route]] = []
        self.write(10)
        routes = [replace(DOCUMENTS), Route("user.*", to="mail")]
        self.file = RouteFile(path, routes, self.taken.append, clock=lambda: self.now)

    def write(self, rollout: Any, *, shadow: str = "false", events: str = "document.*") -> None:
        changing = f'events = "{events}"\nto = "search"\nrollout = {rollout}\nshadow = {shadow}\n'
        self.text(f'[[routes]]\n{changing}[[routes]]\nevents = "user.*"\nto = "mail"\n')

    def text(self, text: str) -> None:
        """Write the text as of so long ago that the file can no longer be open for writing."""
        self.path.write_text(text)
        past = self.path.stat().st_mtime - 60 + self.now
        os.utime(self.path, (past, past))

    def look(self, after: float = 1.0) -> list[Mapping[int, Route]]:
        """Return what is new after so many seconds."""
        self.now += after
        self.file.look()
        new, self.taken[:] = list(self.taken), []
        return new


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "relaybox.toml")


def test_a_file_is_looked_at_once_a_second(watched: Watched) -> None:
    watched.write(11)
    assert watched.look() == [{0: replace(DOCUMENTS, rollout=11)}], "before the first look"
    assert watched.look() == []
    watched.write(20)
    assert watched.look(0.5) == []
    assert watched.look(0.5) == [{0: replace(DOCUMENTS, rollout=20)}]
    assert watched.look() == []
    watched.write(20, shadow="true")
    assert watched.look() == [{0: replace(DOCUMENTS, rollout=20, shadow=True)}]


def test_other_changes_are_left_for_the_next_start(watched: Watched) -> None:
    watched.write(20, events="invoice.*")
    assert watched.look() == []
    watched.text('[[routes]]\nevents = "user.*"\nto = "mail"\nrollout = 5\n')
    assert watched.look() == [{1: Route("user.*", to="mail", rollout=5)}]


@pytest.mark.parametrize(
    "broken", ["[[routes", "routes = 1", "[[routes]]\nevents = 'a'\nto = 'b'\nrollout = 101", None]
)
def test_a_broken_file_is_reported_once_and_changes_nothing(
    watched: Watched, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    watched.look()
    if broken is None:
        watched.path.unlink()
    else:
        watched.text(broken)
    with caplog.at_level(logging.WARNING, "relaybox.core.rollout"):
        assert [watched.look() for _ in range(3)] == [[], [], []]
    [record] = caplog.records
    assert "routes are unchanged" in record.message
    watched.write(30)
    assert watched.look() == [{0: replace(DOCUMENTS, rollout=30)}]


def test_a_file_that_is_just_being_written_is_read_when_that_is_over(watched: Watched) -> None:
    watched.look()
    watched.write(40)
    os.utime(watched.path)
    new = wait_for(lambda: watched.look(0.2))
    assert new == [{0: replace(DOCUMENTS, rollout=40)}]


def test_settings_that_cannot_be_applied_are_reported(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Mapping[int, Route]) -> None:
        raise ConfigError("shadow = True: no")

    file = RouteFile(watched.path, [DOCUMENTS], refuse, clock=lambda: 0.0)
    watched.write(10, shadow="true")
    file.look()
    assert "shadow = True: no" in caplog.text


def test_an_outbox_follows_its_file_for_its_own_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(rollout: float) -> None:
        file = tmp_path / "relaybox.toml"
        route = f'[[routes]]\nevents = "document.*"\nto = "search"\nrollout = {rollout}\n'
        file.write_text(f'[destinations.search]\nsink = "memory:"\n{route}')
        os.utime(file, (1_000_000 + rollout, 1_000_000 + rollout))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("relaybox.core.rollout.EVERY", 0.0)
    write(10)
    box = Outbox(routes=[Route("own.*", to="search", rollout=5)])
    assert (box.enabled("document.*", IN), box.enabled("document.*", OUT)) == (True, False)
    write(100)
    monkeypatch.chdir("/")
    assert box.enabled("document.*", OUT)
    assert [route.rollout for route in box.settings.routes] == [5.0, 100.0]
    box.rollout("document.*", 1)
    assert not box.enabled("document.*", IN), "until the file says something new"
    write(50)
    assert box.enabled("document.*", IN)


def lane(store: MemoryStore, handler: Any, metrics: MetricsObserver, **options: Any) -> Lane:
    together = shared(store, Observers([metrics, LogObserver()]), hasty=True)
    return lanes.make(store, handler, together, **options)


SHADOW, REAL = mark("{}"), '{"note":"relaybox-shadow"}'


@pytest.mark.parametrize("key", [None, "Document:1"])
async def test_a_lane_delivers_what_is_in_shadow_without_its_sink(key: str | None) -> None:
    store, metrics, got = MemoryStore(), MetricsObserver(), []
    insert(store, SHADOW, REAL, mark(REAL), "{}", key=key)

    async def handler(event: Event) -> None:
        got.append(event.aggregate_id)

    assert await lane(store, handler, metrics, ordered=key is not None).once(5.0) == 4
    assert got == ["1", "3"]
    assert set(statuses(store)) == {Status.DELIVERED}
    text = generate_latest(metrics.registry).decode()
    assert 'outbox_shadowed_total{destination="runner"} 2.0' in text
    published = 'outbox_messages_published_total{aggregate_type="Order",destination="runner",event_type='
    assert f'{published}"order.paid"}} 2.0' in text


async def test_what_is_in_shadow_closes_no_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.core.circuit.FIRST_PAUSE", 0.05)
    store, got = MemoryStore(), []
    insert(store, *[SHADOW] * 20)
    open_circuit(store)
    circuit = store.destinations["runner"]

    async def handler(event: Event) -> None:
        got.append(event)
        raise Unavailable("still away")

    async with running(lane(store, handler, MetricsObserver())):
        await await_for(lambda: statuses(store) == [Status.DELIVERED] * 20)
        assert (got, circuit.circuit) == ([], "open")
        insert(store, SHADOW, "{}")
        await await_for(lambda: got and statuses(store).count(Status.DELIVERED) == 21)
    assert circuit.circuit == "open"


def test_a_log_tells_how_much_was_in_shadow(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver(clock=lambda: 0.0)
    settled = [Settlement(make(), Delivered()), Settlement(make(), Delivered(shadow=True))]
    with caplog.at_level(logging.INFO, "relaybox.relay"):
        observer.settled("search", settled, frozenset())
        observer.stopped()
    assert "delivered 2  retried 0  failed 0  in shadow 1" in caplog.text
