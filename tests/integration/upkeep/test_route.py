"""Events that no route took when they were emitted go to their destinations when a route does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from relaybox import Call, Destination, Event, Outbox, Route
from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Settings
from relaybox.errors import StoreError
from relaybox.relay.upkeep.route import Reroute, StoredRouter
from relaybox.relay.upkeep.schedule import Round
from relaybox.stores.sql.upkeep.route import ROUTED
from relaybox.stores.upkeep import Router, Slice, StoredEvent, Target, Turn
from tests.integration.upkeep.bench import Bench, go_on, leading, some
from tests.waiting import await_for

MAIL = Destination("mail", "console:")
INDEX = Destination("index", "console:", ordered=True)
BOTH = Route("order.*", to=("index", "mail"))
FUTURE = datetime.now(UTC).replace(microsecond=123_000) + timedelta(hours=1)
OFF = {"status": "discarded", "next_attempt_at": None}
LEASE: dict[str, Any] = {"leased_until": FUTURE, "lease_token": uuid4(), "lease_owner": "r"}


def emit(bench: Bench, *calls: Call) -> list[UUID]:
    """Emitted by an application without routes; each in a transaction of its own."""
    outbox = Outbox(bench.url, unrouted="store")
    ids = []
    for call in calls:
        with bench.engine.begin() as connection:
            ids += [emitted.event_id for emitted in outbox.emit_many(connection, [call])]
    return ids


def order(n: int = 0, event_type: str = "order.paid", **options: Any) -> Call:
    return Call("Order", n % 3, event_type, {"n": n}, **options)


def router(*routes: Route, destinations: Sequence[Destination] = (MAIL, INDEX)) -> StoredRouter:
    return StoredRouter(Settings(destinations=destinations, routes=routes or (BOTH,)))


def rows(bench: Bench, destination: str | None = None) -> list[Any]:
    """Return the rows, of one destination or of all, in the order of their positions."""
    event = bench.tables.event
    everywhere = [column for column in event.c if not column.name.endswith("_destination")]
    query = sa.select(*everywhere).order_by(event.c.position)
    if destination is not None:
        query = query.where(event.c.destination == destination)
    with bench.engine.connect() as connection:
        return list(connection.execute(query))


async def routed(bench: Bench, by: Router | None = None, wake: Callable[..., None] = lambda _: None) -> Round:
    upkeep, term = await bench.leader()
    return await Reroute(upkeep.unrouted, by or router(), wake, MonotonicClock(), go_on).round(term)


async def walk(bench: Bench, by: Router, limit: int) -> list[Slice[Turn]]:
    """Walk from the beginning to the end."""
    (upkeep, term), steps = await bench.leader(), list[Slice[Turn]]()
    while not steps or steps[-1].after is not None:
        step = some(await upkeep.unrouted.route(term, by, steps[-1].after if steps else None, limit))
        steps.append(step)
    return steps


class Meanwhile:
    """A router that does something just before it answers for the first time."""

    def __init__(self, act: Callable[[], None], inner: Router) -> None:
        self._act: Callable[[], None] | None = act
        self._inner = inner

    def takes(self, event_type: str) -> bool:
        return self._inner.takes(event_type)

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        act, self._act = self._act, None
        if act is not None:
            act()
        return self._inner.targets(event)


async def test_one_that_somebody_spoilt_stays_and_the_others_go(bench: Bench) -> None:
    if bench.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL keeps nothing but UUIDs there")
    spoilt, whole = emit(bench, order(1), order(2))
    with bench.engine.begin() as connection:
        spoil = sa.text("UPDATE outbox_event SET event_id = '' WHERE event_id = :id")
        connection.execute(spoil, {"id": spoilt.hex})
    assert await routed(bench) == Round(1)
    assert [row.event_id for row in rows(bench, "mail")] == [whole]


@pytest.mark.parametrize("position", ["x'00ff'", "'garbage'", "-1.5"])
async def test_a_position_that_is_not_a_number_delays_nothing_and_keeps_the_order_of_the_others(
    bench: Bench, position: str
) -> None:
    only_sqlite(bench)
    first, spoilt, second, third = emit(bench, *(order(3 * n) for n in range(4)))
    spoil(bench, spoilt, f"position = {position}")
    spoil(bench, first, "next_attempt_at = datetime('now')")
    assert await routed(bench) == Round(4)
    for name in ("mail", "index"):
        ids = [row.event_id for row in rows(bench, name)]
        assert spoilt in ids
        assert [id_ for id_ in ids if id_ != spoilt] == [first, second, third]


@pytest.mark.parametrize("id_", ["x'00ff'", "'ab' || char(0) || 'c'"])
async def test_a_row_whose_id_no_statement_can_name_stays_and_the_others_go(bench: Bench, id_: str) -> None:
    only_sqlite(bench)
    spoilt, whole = emit(bench, order(1), order(2))
    spoil(bench, spoilt, f"id = {id_}, position = 7")
    spoil(bench, whole, "position = 7")
    assert await routed(bench) == Round(1)
    assert [row.event_id for row in rows(bench, "mail")] == [whole]
    with bench.engine.connect() as connection:
        kept = connection.exec_driver_sql("SELECT event_id FROM outbox_event WHERE destination = ''")
        assert kept.scalars().all() == [spoilt.hex]


async def test_a_row_that_breaks_a_constraint_stays_and_is_named_once_and_the_others_go(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows of one event id would be copied to the same ids."""
    *_, last = ids = emit(bench, *(order(n) for n in range(5)))
    event = bench.tables.event
    with bench.engine.begin() as connection:
        connection.execute(event.update().where(event.c.event_id == last).values(event_id=ids[0]))
    upkeep, term = await bench.leader()
    reroute = Reroute(upkeep.unrouted, router(), lambda _: None, MonotonicClock(), go_on)
    assert await reroute.round(term) == Round(4)
    assert [row.event_id for row in rows(bench, "mail")] == ids[:4]
    [stays] = rows(bench, "")
    assert await reroute.round(term) == Round()
    [said] = [record.getMessage() for record in caplog.records if "constraint" in record.getMessage()]
    assert str(stays.id) in said or stays.id.hex in said


async def test_the_greatest_of_all_event_ids_is_routed(bench: Bench) -> None:
    [id_] = emit(bench, order(1))
    event, greatest = bench.tables.event, UUID(int=2**128 - 1)
    with bench.engine.begin() as connection:
        connection.execute(event.update().where(event.c.event_id == id_).values(event_id=greatest))
    assert await routed(bench) == Round(1)
    assert [row.event_id for row in rows(bench, "mail")] == [greatest]


def only_sqlite(bench: Bench) -> None:
    if bench.engine.dialect.name != "sqlite":
        pytest.skip("only SQLite keeps a value of another type than that of the column")


def spoil(bench: Bench, event_id: UUID, values: str) -> None:
    """Edit the row of an event by hand."""
    with bench.engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        update = f"UPDATE outbox_event SET {values} WHERE event_id = ?"  # noqa: S608
        connection.exec_driver_sql(update, (event_id.hex,))


async def test_an_event_goes_to_every_destination_that_takes_it_as_it_was_emitted(bench: Bench) -> None:
    call = order(1, idempotency_key="once", headers={"a": "ü"}, tenant="t", max_attempts=9)
    binary = Call("Order", "ö", "order.paid", b"\0\xff", key="k" * 300)
    ids = emit(bench, call, binary)
    before = {row.event_id: row for row in rows(bench)}
    bench.age(bench.tables.event.c.created_at, 60)
    created = set(bench.column(bench.tables.event.c.created_at))
    woken: list[str] = []
    assert await routed(bench, wake=woken.extend) == Round(2)
    assert sorted(woken) == ["index", "mail"]
    after = rows(bench)
    assert [(row.event_id, row.destination) for row in after] == [
        (id_, name) for id_ in ids for name in ("index", "mail")
    ]
    assert len({row.id for row in after} | before.keys()) == 6, "rows of their own"
    same = ("payload", "payload_data", "payload_encoding", "headers", "idempotency_key", "aggregate_id")
    for row in after:
        assert all(getattr(row, name) == getattr(before[row.event_id], name) for name in same)
        assert (row.status, row.attempts, row.crashes) == ("pending", 0, 0)
    assert {row.created_at for row in after} == created, "lag is counted from the emit on"
    assert [row.max_attempts for row in after] == [9, 9, 5, 5]
    keys = [row.ordering_key for row in after]
    assert (keys[0], keys[1], keys[3]) == ("Order:1", None, None)
    assert keys[2].startswith("k" * 190 + "#")
    assert await routed(bench) == Round(0)


async def test_the_order_of_each_key_is_kept_from_batch_to_batch(bench: Bench) -> None:
    emit(bench, *map(order, range(30)))
    steps = await walk(bench, router(), 7)
    assert sum(step.changed for step in steps) == 30
    for name in ("index", "mail"):
        assert [row.payload["n"] for row in rows(bench, name)] == list(range(30))
    assert not rows(bench, "")


async def test_a_page_is_routed_in_several_transactions_and_in_the_order_of_positions(bench: Bench) -> None:
    emit(bench, *map(order, range(ROUTED + 20)))
    # The clock was set back while they were emitted.
    first = rows(bench)[0]
    event = bench.tables.event
    late = first.next_attempt_at + timedelta(minutes=10) - timedelta(hours=1)
    bench.age(event.c.next_attempt_at, 3600)
    bench.execute(sa.update(event).where(event.c.id == first.id).values(next_attempt_at=late))
    assert await routed(bench) == Round(ROUTED + 20)
    assert [row.payload["n"] for row in rows(bench, "index")] == list(range(ROUTED + 20))


async def test_what_is_to_be_delivered_later_still_is(bench: Bench) -> None:
    emit(bench, order(1, deliver_at=FUTURE))
    assert await routed(bench, router(Route("order.*", to="mail"))) == Round(1)
    [row] = rows(bench)
    assert (row.destination, row.next_attempt_at.replace(tzinfo=UTC)) == ("mail", FUTURE)


async def test_what_is_ordered_waits_until_it_is_due_and_holds_up_no_key(bench: Bench) -> None:
    later, now = emit(bench, order(1, deliver_at=FUTURE), order(1))
    assert await routed(bench) == Round(1)
    assert [row.event_id for row in rows(bench, "")] == [later]
    bench.age(bench.tables.event.c.next_attempt_at, 3700)
    assert await routed(bench) == Round(1)
    assert [row.event_id for row in rows(bench, "index")] == [now, later]


async def test_what_nobody_takes_stays_and_does_not_starve_what_is_behind_it(bench: Bench) -> None:
    strangers = emit(bench, *(order(n, "nobody.asked") for n in range(12)))
    emit(bench, order(12))
    steps = await walk(bench, router(), 5)
    assert [step.changed for step in steps] == [0, 0, 1]
    assert [row.event_id for row in rows(bench, "")] == strangers
    assert len(rows(bench)) == 14


async def test_events_of_one_moment_are_each_looked_at_once(bench: Bench) -> None:
    emit(bench, *(order(n, "nobody.asked") for n in range(9)))
    moment = datetime.now(UTC).replace(microsecond=0)
    bench.execute(sa.update(bench.tables.event).values(next_attempt_at=moment))
    seen: list[str] = []

    class Listening:
        def takes(self, event_type: str) -> bool:
            seen.append(event_type)
            return False

        def targets(self, event: StoredEvent) -> Sequence[Target]:
            raise AssertionError("nobody takes it")

    assert len(await walk(bench, Listening(), 2)) == 5
    assert len(seen) == 9


async def test_what_is_not_pending_or_is_leased_is_left_alone(bench: Bench) -> None:
    for status in ("failed", "discarded", "delivered"):
        bench.put("", status)
    bench.put("", **LEASE)
    before = bench.ids()
    assert await routed(bench) == Round(0)
    assert bench.ids() == before


async def test_its_attempts_go_with_the_row(bench: Bench) -> None:
    bench.attempt(bench.put(""))
    bench.attempt(kept := uuid4())
    assert await routed(bench) == Round(1)
    assert bench.column(bench.tables.attempt.c.delivery_id) == [kept]


async def test_a_leader_whose_term_is_over_changes_nothing(bench: Bench) -> None:
    emit(bench, order())
    before = bench.ids()
    zombie, other = bench.upkeep(), bench.upkeep()
    term = await leading(zombie, "one")
    await zombie.members.resign("one")
    await leading(other, "two")
    assert await zombie.unrouted.route(term, router(), None, 10) is None
    assert bench.ids() == before


async def test_a_term_that_ends_between_looking_and_routing_changes_nothing(bench: Bench) -> None:
    emit(bench, order())
    before, leader = bench.ids(), bench.tables.leader
    upkeep, term = await bench.leader()
    elected = sa.update(leader).values(term=leader.c.term + 1, relay="another")
    assert (
        await upkeep.unrouted.route(term, Meanwhile(lambda: bench.execute(elected), router()), None, 10)
        is None
    )
    assert bench.ids() == before


async def test_an_event_that_breaks_in_the_middle_is_left_as_it_was_and_the_others_go(bench: Bench) -> None:
    emit(bench, *map(order, range(5)))
    before = rows(bench)[-1]
    bench.attempt(before.id)
    counts = bench.column(bench.tables.attempt.c.delivery_id)

    class Breaking:
        def takes(self, event_type: str) -> bool:
            return True

        def targets(self, event: StoredEvent) -> Sequence[Target]:
            # No database takes the second row of the last event.
            last = '"n":4' in str(event.payload).replace(" ", "")
            return [Target("mail", None, 5), Target("index", "k", 0 if last else 5)]

    upkeep, term = await bench.leader()
    assert await upkeep.unrouted.route(term, Breaking(), None, 10) == Slice(4, None)
    assert rows(bench, "") == [before]
    assert Counter(row.destination for row in rows(bench)) == {"mail": 4, "index": 4, "": 1}
    assert bench.column(bench.tables.attempt.c.delivery_id) == counts
    assert await upkeep.unrouted.route(term, router(), None, 10) == Slice(1, None)
    assert Counter(row.destination for row in rows(bench)) == {"mail": 5, "index": 5}


@pytest.mark.parametrize("values", [{"destination": "other"}, OFF, LEASE], ids=["moved", "off", "leased"])
async def test_what_an_operator_did_in_the_meantime_stands(bench: Bench, values: dict[str, Any]) -> None:
    touched, free = emit(bench, order(0), order(1))
    event = bench.tables.event
    change = sa.update(event).where(event.c.event_id == touched).values(**values)
    assert await routed(bench, Meanwhile(lambda: bench.execute(change), router())) == Round(1)
    assert Counter(row.event_id for row in rows(bench)) == {touched: 1, free: 2}


async def test_nothing_gets_ahead_of_a_row_that_somebody_has_locked(bench: Bench) -> None:
    if not bench.locks_rows:
        pytest.skip("SQLite has one writer at a time anyway")
    moved, _ = emit(bench, order(0), order(0))
    event = bench.tables.event
    with bench.engine.begin() as connection:
        move = sa.update(event).where(event.c.event_id == moved).values(destination="other")
        connection.execute(move)
        upkeep = bench.upkeep()
        term = await leading(upkeep)
        with pytest.raises(StoreError):
            await upkeep.unrouted.route(term, router(), None, 10)
        assert await upkeep.members.lead("leader", 60.0) == term, "and the leader's row is free again"
    assert await upkeep.unrouted.route(term, router(), None, 10) == Slice(1, None)
    assert Counter(row.destination for row in rows(bench)) == {"other": 1, "mail": 1, "index": 1}


async def test_an_event_without_a_key_to_be_had_waits_and_is_named(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    [without], _ = emit(bench, order(1)), emit(bench, order(2, tenant="t"))
    by_tenant = replace(INDEX, ordering="tenant")
    upkeep = bench.upkeep()
    job = Reroute(
        upkeep.unrouted, router(destinations=[MAIL, by_tenant]), lambda _: None, MonotonicClock(), go_on
    )
    term = await leading(upkeep)
    assert [(await job.round(term)).changed for _ in range(2)] == [1, 0]
    assert [row.event_id for row in rows(bench, "")] == [without]
    assert [row.ordering_key for row in rows(bench, "index")] == ["t"]
    [message] = [record.getMessage() for record in caplog.records]
    assert str(without) in message
    assert "give tenant= or key=" in message


async def test_a_relay_that_does_not_lead_routes_what_only_it_has_a_route_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.relay.upkeep.caretaker.ROUTE", 0.1)
    leader, follower, arrived = Outbox(bench.url), Outbox(bench.url), list[Event]()

    @leader.handler("nobody.asked", name="other")
    async def other(event: Event) -> None:
        raise AssertionError("nobody emits it")

    @follower.handler("order.*", name="mail")
    async def mail(event: Event) -> None:
        arrived.append(event)

    async with leader.relay():
        await await_for(lambda: bench.column(bench.tables.leader.c.relay), "it leads")
        ids = emit(bench, *map(order, range(5)))
        async with follower.relay():
            await await_for(lambda: len(arrived) == 5, "they are routed and delivered")
    assert sorted(event.id for event in arrived) == sorted(ids)


async def test_relays_that_route_at_once_route_each_event_once_and_in_order(bench: Bench) -> None:
    emit(bench, *map(order, range(4 * ROUTED)))
    _, term = await bench.leader()
    upkeeps = [bench.upkeep() for _ in range(3)]
    routed = await asyncio.gather(*(upkeep.unrouted.route(term, router(), None, 1000) for upkeep in upkeeps))
    assert sum(some(one).changed for one in routed) == 4 * ROUTED
    for name in ("index", "mail"):
        assert [row.payload["n"] for row in rows(bench, name)] == list(range(4 * ROUTED))


async def test_a_relay_that_starts_with_a_new_route_delivers_what_waited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.relay.upkeep.caretaker.ROUTE", 0.1)
    emit(bench, *(order(n) for n in range(40)), order(0, "nobody.asked"))
    # Only who is woken looks again within the test's time.
    idle = {"poll_interval": "1h"}
    outbox = Outbox(bench.url)
    arrived: dict[str, list[Event]] = {"mail": [], "index": []}

    def take(name: str) -> Callable[[Event], Any]:
        async def handler(event: Event) -> None:
            arrived[name].append(event)

        return handler

    outbox.handler("order.*", name="mail", **idle)(take("mail"))
    outbox.handler("order.*", name="index", ordered=True, **idle)(take("index"))
    async with outbox.relay():
        await await_for(lambda: all(len(events) == 40 for events in arrived.values()))
    for events in arrived.values():
        assert len({event.id for event in events}) == 40
    numbers = [event.payload["n"] for event in arrived["index"]]
    assert all([n for n in numbers if n % 3 == key] == list(range(key, 40, 3)) for key in range(3))
    assert [row.event_type for row in rows(bench, "")] == ["nobody.asked"]
