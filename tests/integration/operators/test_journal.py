"""What is on record besides the rows, asked on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.fingerprint import fingerprint
from relaybox.core.outcome import Failed
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.operate.admin import Admin
from relaybox.operate.history import Point
from relaybox.stores.journal import STALLED, Counted
from relaybox.stores.ledger import Filter
from relaybox.stores.sql.upkeep.sample import SqlSamples
from relaybox.stores.store import DeadLetter, Settlement
from relaybox.stores.upkeep import Sample
from tests.integration.operated import DESTINATIONS, Operated, stop_counting_at


def put(outbox: Operated, table: sa.Table, *rows: dict[str, Any]) -> None:
    with outbox.engine.begin() as connection:
        connection.execute(sa.insert(table), list(rows))


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def this_minute(ago: int = 0) -> datetime:
    return datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=ago)


def counted(minute: datetime, destination: str = "mail", relay: str = "r1", **counts: Any) -> dict[str, Any]:
    values = {"delivered": 0, "retried": 0, "failed": 0, "lag": {}, **counts}
    return {"minute": minute, "destination": destination, "relay": relay, **values}


async def points(outbox: Operated, minutes: Iterable[datetime], name: str | None = None) -> list[Point]:
    """Return the points of a series by their times: the minute may have changed since."""
    found = {one.at: one for one in (await outbox.admin.series(1, name)).points}
    return [found[minute] for minute in minutes]


async def fail_all(outbox: Operated, destination: str, *errors: str) -> list[UUID]:
    """Emit an event for each error and let it fail with that error."""
    ids = [outbox.emit(destination, aggregate_id=number) for number in range(len(errors))]
    claim = await outbox.claim(destination)
    by_id = dict(zip(ids, errors, strict=True))
    settlements = [Settlement(one, Failed(by_id[one.event_id])) for one in claim.deliveries]
    assert len(settlements) == len(errors)
    assert not await outbox.store.settle(settlements)
    return ids


async def test_a_series_adds_up_what_relays_counted(outbox: Operated) -> None:
    then = this_minute(3)
    put(
        outbox,
        outbox.tables.stats,
        counted(then, delivered=60, retried=1, lag={"0": 50, "10": 10}),
        counted(then, relay="r2", delivered=60, failed=2, lag={"20": 60}),
        counted(then, "shop", delivered=120, lag={"0": 1000}),
        counted(this_minute(3000), delivered=1, lag={"0": 1}),
    )
    [point] = await points(outbox, [then], "mail")
    assert (point.delivered, point.retried, point.failed) == (2.0, 1, 2)
    assert point.p50 == pytest.approx(0.032)
    assert point.p99 == pytest.approx(1.024)
    whole = (await outbox.admin.series(1)).points
    assert [(one.at, one.delivered) for one in whole if one.delivered] == [(then, 4.0)]
    assert [one.p50 for one in await points(outbox, [then])] == [pytest.approx(0.001)]
    week = (await outbox.admin.series(168, "mail")).points
    assert sum(one.delivered for one in week) > 0
    assert len(week) == 168


async def test_a_series_shows_what_was_sampled(outbox: Operated) -> None:
    last = this_minute(2)
    minutes = [last - timedelta(minutes=ago) for ago in (2, 1, 0)]
    samples = [(100, 10, 1.5), (220, 20, 2.5), (400, 15, None)]
    for then, (position, pending, oldest) in zip(minutes, samples, strict=True):
        one = {"minute": then, "pending": pending, "failed": 1, "oldest_seconds": oldest}
        put(
            outbox,
            outbox.tables.sample,
            {**one, "destination": "", "position": position},
            {**one, "destination": "mail", "position": None, "pending": 1},
        )
    found = await points(outbox, minutes)
    assert [one.pending for one in found] == [10, 20, 15]
    assert [one.oldest_seconds for one in found] == [1.5, 2.5, None]
    assert [one.emitted for one in found] == [None, 2.0, 3.0]
    mail = await points(outbox, minutes, "mail")
    assert [(one.pending, one.emitted) for one in mail] == [(1, None)] * 3


async def test_a_series_of_no_destination_or_no_length_is_refused(outbox: Operated) -> None:
    with pytest.raises(ConfigError, match="no destination is called 'mial'"):
        await outbox.admin.series(1, "mial")
    with pytest.raises(ConfigError, match="hours = 0"):
        await outbox.admin.series(0)


async def test_failures_are_grouped_by_what_went_wrong(outbox: Operated) -> None:
    errors = ("ValueError: order 1", "ValueError: order 22", "422 No", "ValueError: Order 3")
    ids = await fail_all(outbox, "mail", *errors)
    await fail_all(outbox, "web", "ValueError: order 1")
    found = await outbox.admin.failures()
    assert (found.looked_at, found.capped) == (5, False)
    groups = {(one.destination, one.message): one for one in found.groups}
    assert {key: group.count for key, group in groups.items()} == {
        ("mail", "ValueError: order #"): 2,
        ("mail", "ValueError: Order #"): 1,
        ("mail", "422 No"): 1,
        ("web", "ValueError: order #"): 1,
    }
    largest = found.groups[0]
    assert largest is groups["mail", "ValueError: order #"]
    assert (largest.error_class, largest.error) == ("ValueError", "ValueError: order 22")
    assert (largest.event_types, largest.example) == (("order.paid",), ids[1])
    assert largest.fingerprint == fingerprint("mail", "ValueError: order 9").hash
    assert largest.first_at <= largest.last_at <= datetime.now(UTC) + timedelta(seconds=5)
    only = await outbox.admin.failures("web")
    assert [one.destination for one in only.groups] == ["web"]
    assert len((await outbox.admin.failures(limit=2)).groups) == 2


async def test_a_group_is_listed_counted_and_retried_by_its_fingerprint(outbox: Operated) -> None:
    ids = await fail_all(outbox, "mail", *(f"KeyError: {n}" if n % 2 else f"busy {n}" for n in range(20)))
    name = fingerprint("mail", "KeyError: 7").hash
    listed, cursor = [], None
    while True:
        page = await outbox.admin.events(Filter(fingerprint=name), limit=3, cursor=cursor)
        listed += [entry.id for entry in page.entries]
        if (cursor := page.cursor) is None:
            break
    assert listed == list(reversed(ids[1::2]))
    assert await outbox.admin.count("retry", Filter(fingerprint=name)) == Counted(10, False)
    assert (await outbox.admin.retry(Filter(fingerprint=name, destination="mail"))).affected == 10
    rows = {row.id: row for row in outbox.rows()}
    assert {rows[id_].status for id_ in ids[1::2]} == {"pending"}
    assert {(rows[id_].attempts, rows[id_].error_message) for id_ in ids[1::2]} == {(0, None)}
    assert {rows[id_].status for id_ in ids[::2]} == {"failed"}
    assert (await outbox.admin.failures()).looked_at == 10
    with pytest.raises(ConfigError, match="only failed deliveries have a fingerprint"):
        await outbox.admin.discard(Filter(fingerprint=name, status="pending"))


async def test_counts_say_what_an_action_would_be_about(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fail_all(outbox, "mail", *(["busy"] * 12))
    for _ in range(3):
        outbox.emit("web")
    count = outbox.admin.count
    assert await count("retry", Filter()) == Counted(12, False)
    assert await count("discard", Filter(status="pending", destination="web")) == Counted(3, False)
    assert await count("replay", Filter()) == Counted(0, False)
    assert await count("retry", Filter(event_type="no.such")) == Counted(0, False)
    assert await count("move", Filter(destination="mail"), to="spare") == Counted(12, False)
    with pytest.raises(ConfigError, match="status = 'delivered': retry takes failed"):
        await count("retry", Filter(status="delivered"))
    with pytest.raises(ConfigError, match="to: name the destination"):
        await count("move", Filter(destination="mail"))
    stop_counting_at(10, monkeypatch)
    assert await count("retry", Filter()) == Counted(10, True)
    assert await count("retry", Filter(error="busy")) == Counted(10, True)
    outbox.change(outbox.rows(destination="web")[0].id, status="discarded", next_attempt_at=None)
    assert await count("replay", Filter(status="discarded")) == Counted(1, False)


async def test_dead_letters_are_listed_with_their_origin_and_reason(outbox: Operated) -> None:
    destinations = [*DESTINATIONS[1:], Destination("shop", "console:", ordered=True, dead_letter="web")]
    admin = Admin(outbox.ledger, destinations, "tester")
    for number in range(3):
        outbox.emit("mail", aggregate_id=number)
    claim = await outbox.claim("mail")
    settlements = [Settlement(one, Failed(f"no {n}")) for n, one in enumerate(claim.deliveries)]
    await outbox.store.settle(settlements, dead_letter=DeadLetter("web", 5, ordered=False))
    outbox.emit("web", marks={"relaybox-dead-letter-from": 7})
    await outbox.settle("web", Failed("gone"), limit=1)
    found = await admin.dead_letters()
    seen = [(row.origin, row.reason) for row in found.rows]
    assert seen == [(None, None), ("mail", "no 2"), ("mail", "no 1"), ("mail", "no 0")]
    assert found.cursor is None
    first = await admin.dead_letters(3)
    rest = await admin.dead_letters(3, first.cursor)
    pages = [row.entry.id for row in (*first.rows, *rest.rows)]
    assert pages == [row.entry.id for row in found.rows]
    assert (await outbox.admin.dead_letters()).rows == ()


async def test_audits_are_listed_newest_first_in_pages(outbox: Operated) -> None:
    for number in range(5):
        await outbox.admin.note("login", {"number": number})
    await outbox.admin.acting_as("ann").pause("mail", "because")
    first = await outbox.admin.audits(2)
    done = [(row.actor, row.action, row.affected) for row in first.rows]
    assert done == [("ann", "pause", 1), ("tester", "login", 0)]
    assert first.rows[0].details["reason"] == "because"
    assert first.rows[1].details == {"number": 4}
    assert abs(first.rows[0].at - datetime.now(UTC)) < timedelta(minutes=1)
    rest = await outbox.admin.audits(10, first.cursor)
    assert [row.details["number"] for row in rest.rows] == [3, 2, 1, 0]
    assert rest.cursor is None
    assert (await outbox.admin.audits(10, 2**80)).rows[0].action == "pause"
    with pytest.raises(ConfigError, match="limit = 0"):
        await outbox.admin.audits(0)


@pytest.mark.parametrize("destination", ["mail", "shop"])
async def test_a_test_event_goes_its_way_like_any_other(outbox: Operated, destination: str) -> None:
    event_id = await outbox.admin.test(destination)
    [row] = outbox.rows()
    assert (row.id, row.event_id) == (event_id, event_id)
    assert (row.destination, row.ordering_key) == (destination, None)
    assert (row.aggregate_type, row.aggregate_id, row.event_type) == ("relaybox", "test", "relaybox.test")
    assert outbox.done() == [("tester", "test", 1)]
    await outbox.deliver(destination)
    assert outbox.row(event_id).status == "delivered"
    with pytest.raises(ConfigError, match="no destination is called 'nowhere'"):
        await outbox.admin.test("nowhere")


async def test_an_operation_is_on_record_until_it_ends(outbox: Operated) -> None:
    journal, id_, other = outbox.ledger.journal, uuid4(), uuid4()
    await journal.begin(id_, "retry", "ann", {"filter": {"status": "failed"}}, Counted(7, True))
    found = await outbox.operation(id_)
    assert (found.state, found.total, found.capped, found.done) == ("running", 7, True, 0)
    assert (found.action, found.actor, found.details) == ("retry", "ann", {"filter": {"status": "failed"}})
    assert await journal.advance(id_, 3, 1)
    await journal.finish(id_, "done", 6, 1)
    found = await outbox.operation(id_)
    assert (found.state, found.done, found.skipped, found.error) == ("done", 6, 1, None)
    assert found.finished_at is not None
    assert not await outbox.admin.cancel(id_)
    assert not await outbox.admin.cancel(other)
    assert await outbox.admin.operation(other) is None
    assert await outbox.admin.operations() == (found,)


async def test_an_operation_that_was_cancelled_learns_of_it_and_stays_so(outbox: Operated) -> None:
    journal, id_ = outbox.ledger.journal, uuid4()
    await journal.begin(id_, "retry", "ann", {}, None)
    assert await outbox.admin.cancel(id_)
    assert not await journal.advance(id_, 3, 0)
    await journal.finish(id_, "done", 4, 0)
    found = await outbox.operation(id_)
    assert (found.state, found.total, found.done) == ("cancelled", None, 4)
    assert [action for _, action, _, _ in outbox.audit()] == ["cancel"]


async def test_an_operation_without_a_sign_of_life_is_stalled(outbox: Operated) -> None:
    table, id_ = outbox.tables.operation, uuid4()
    await outbox.ledger.journal.begin(id_, "retry", "ann", {}, None)
    with outbox.engine.begin() as connection:
        connection.execute(sa.update(table).where(table.c.id == id_).values(updated_at=ago(STALLED + 5)))
    [found] = await outbox.admin.operations()
    assert found.state == "stalled"
    assert await outbox.admin.cancel(id_)
    assert [one.state for one in await outbox.admin.operations()] == ["cancelled"]


async def test_health_names_what_keeps_deliveries_from_flowing(outbox: Operated) -> None:
    assert (await outbox.admin.health()).ready
    ids = [outbox.emit(name) for name in ("mail", "web")]
    [nobody] = (await outbox.admin.health()).problems
    assert (nobody.destination, nobody.reason) == (None, "no relay is alive, and work is due")
    outbox.beat(ago=-600)
    assert (await outbox.admin.health()).ready
    for id_ in ids:
        outbox.change(id_, **dict.fromkeys(("next_attempt_at", "updated_at", "created_at"), ago(90)))
    put(outbox, outbox.tables.stats, counted(this_minute(), "web", delivered=1), counted(this_minute()))
    [stuck] = (await outbox.admin.health()).problems
    assert (stuck.destination, stuck.reason) == ("mail", "work is due and nothing settles")
    assert stuck.seconds == pytest.approx(90, abs=60)
    await outbox.back_off("mail")
    await outbox.store.open_circuit("mail", 3600.0, "refused")
    [dead] = (await outbox.admin.health()).problems
    assert (dead.destination, dead.reason) == ("mail", "its circuit is open: refused")
    await outbox.admin.pause("mail", "because")
    assert (await outbox.admin.health()).ready
    await outbox.admin.resume("mail")
    assert (await outbox.admin.health()).ready


async def test_health_says_that_the_database_does_not_answer(outbox: Operated) -> None:
    outbox.emit("mail")
    with outbox.engine.begin() as connection:
        outbox.tables.stats.drop(connection)
    [problem] = (await outbox.admin.health()).problems
    assert problem.reason.startswith("the database does not answer: ")


async def test_a_destination_is_given_the_time_that_its_rate_takes(outbox: Operated) -> None:
    slow = Destination("mail", "console:", rate_limit="18/h")
    admin = Admin(outbox.ledger, [slow], "tester")
    outbox.beat(ago=-600)
    id_ = outbox.emit("mail")
    outbox.change(id_, **dict.fromkeys(("next_attempt_at", "updated_at"), ago(300)))
    assert (await admin.health()).ready
    assert not (await outbox.admin.health()).ready
    outbox.change(id_, **dict.fromkeys(("next_attempt_at", "updated_at"), ago(900)))
    assert not (await admin.health()).ready
    put(outbox, outbox.tables.stats, counted(this_minute(5), delivered=1, retried=1, failed=1))
    assert (await admin.health()).ready
    assert not (await outbox.admin.health()).ready


async def test_a_sample_counts_what_waits(outbox: Operated) -> None:
    samples = SqlSamples(outbox.store)
    outbox.emit("web")
    before, _ = await samples.position()
    assert before is not None
    await fail_all(outbox, "mail", "busy", "busy")
    for _ in range(3):
        outbox.emit("mail")
    outbox.emit("shop")
    await outbox.back_off("shop")
    parked = outbox.emit("shop")
    await outbox.claim("shop")
    outbox.change(parked, created_at=ago(3600))
    outbox.emit("gone")
    await outbox.fail("gone")
    assert set(await samples.names()) == {"mail", "shop", "gone", "web"}
    mail, shop = await samples.measure("mail", 100), await samples.measure("shop", 100)
    assert (mail.pending, mail.failed) == (3, 2)
    assert mail.oldest_seconds is not None
    assert 0 <= mail.oldest_seconds < 60
    assert (shop.pending, shop.failed) == (2, 0)
    assert shop.oldest_seconds == pytest.approx(3600, abs=60)
    assert await samples.measure("nowhere", 100) == Sample("nowhere", 0, 0, None)
    assert (await samples.measure("mail", 2)).pending == 2
    after, now = await samples.position()
    assert after == before + 8
    assert abs(now - datetime.now(UTC)) < timedelta(minutes=1)


async def test_two_who_ask_at_once_do_not_disturb_each_other(outbox: Operated) -> None:
    await fail_all(outbox, "mail", "busy", "busy")
    asked = [outbox.admin.failures(), outbox.admin.health(), outbox.admin.series(1), outbox.admin.audits()]
    answers = await asyncio.gather(*asked, *[outbox.admin.count("retry", Filter()) for _ in range(5)])
    assert answers[-1] == Counted(2, False)
