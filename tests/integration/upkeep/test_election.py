"""Which relays are alive, which of them leads, and what it may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.operate.open_relay import new_tally
from relaybox.relay.upkeep.caretaker import Caretaker
from relaybox.relay.upkeep.tally import DatabaseTime, Tally
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Beat, Member, Minute
from tests.integration.upkeep.bench import DAY, LIVE, Bench, leading, member, some
from tests.locks import waiters
from tests.waiting import await_for


class Fast(MonotonicClock):
    """A clock on which a rest of a minute takes a second; leases are as long as ever."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 60)


async def test_a_beat_sees_who_was_seen_by_the_databases_clock(bench: Bench) -> None:
    upkeep = bench.upkeep()
    assert (await upkeep.members.beat(member("b"), LIVE)).alive == ("b",)
    bench.age(bench.tables.relay.c.seen_at, LIVE / 2)
    beat = await upkeep.members.beat(member("a"), LIVE)
    assert beat.alive == ("a", "b")
    assert abs(beat.now - datetime.now(UTC)) < timedelta(seconds=60)
    bench.age(bench.tables.relay.c.seen_at, LIVE)
    assert (await upkeep.members.beat(member("a"), LIVE)).alive == ("a",)
    assert set(bench.column(bench.tables.relay.c.name)) == {"a", "b"}


async def test_a_relay_that_leaves_is_gone_and_one_not_seen_for_a_day_is_forgotten(bench: Bench) -> None:
    upkeep = bench.upkeep()
    await upkeep.members.beat(member("a"), LIVE)
    await upkeep.members.beat(member("b"), LIVE)
    await upkeep.members.leave("a")
    assert (await upkeep.members.beat(member("b"), LIVE)).alive == ("b",)
    bench.age(bench.tables.relay.c.seen_at, DAY + 1)
    await upkeep.members.beat(member("new"), LIVE)
    assert bench.column(bench.tables.relay.c.name) == ["new"]


async def test_of_many_that_join_at_once_at_most_one_finds_itself_alone(bench: Bench) -> None:
    upkeeps = [bench.upkeep() for _ in range(4)]
    for _ in range(5):
        names = [uuid4().hex for _ in upkeeps]
        beats = await asyncio.gather(
            *(upkeep.members.beat(member(name), LIVE) for upkeep, name in zip(upkeeps, names, strict=True))
        )
        assert sum(len(beat.alive) == 1 for beat in beats) <= 1
        assert max(len(beat.alive) for beat in beats) == len(upkeeps)
        bench.execute(sa.delete(bench.tables.relay))


async def test_one_leads_until_its_lease_is_over_and_the_next_term_is_higher(bench: Bench) -> None:
    one, other = bench.upkeep(), bench.upkeep()
    term = await leading(one, "one")
    assert await other.members.lead("other", 60.0) is None
    assert await one.members.lead("one", 60.0) == term, "renewing began a new term"
    bench.age(bench.tables.leader.c.leads_until, 61)
    assert await other.members.lead("other", 60.0) == term + 1
    assert await one.members.lead("one", 60.0) is None
    bench.age(bench.tables.leader.c.leads_until, 61)
    assert await other.members.lead("other", 60.0) == term + 2, "so it is for the one that led"


async def test_a_leader_that_resigns_and_leaves_is_followed_at_once_by_a_higher_term(bench: Bench) -> None:
    upkeep, term = await bench.leader("one")
    await upkeep.members.beat(member("one"), LIVE)
    await upkeep.members.resign("other")
    assert await upkeep.members.lead("other", 60.0) is None, "only the leader can resign"
    await upkeep.members.resign("one")
    await upkeep.members.leave("one")
    assert await upkeep.members.lead("other", 60.0) == term + 1, "though every relay was gone"


async def test_of_many_that_want_to_lead_at_once_one_does(bench: Bench) -> None:
    upkeeps = [bench.upkeep() for _ in range(4)]
    issued: list[int] = []
    for _ in range(8):
        terms = await asyncio.gather(*(u.members.lead(f"relay {n}", 60.0) for n, u in enumerate(upkeeps)))
        [term] = [term for term in terms if term is not None]
        issued.append(term)
        bench.age(bench.tables.leader.c.leads_until, 61)
    assert issued == list(range(issued[0], issued[0] + 8)), "each term is issued once"


async def test_the_relays_table_shows_who_leads(bench: Bench) -> None:
    upkeep, relay = bench.upkeep(), bench.tables.relay
    for name in ("one", "two"):
        await upkeep.members.beat(member(name), LIVE)
    term = await leading(upkeep, "one")
    await upkeep.members.lead("two", 60.0)
    with bench.engine.connect() as connection:
        shown = {row.name: row for row in connection.execute(sa.select(relay))}
    assert (shown["one"].term, shown["two"].term) == (term, None)
    assert shown["one"].leads_until is not None
    await upkeep.members.resign("one")
    assert bench.column(relay.c.leads_until) == [None, None]


@asynccontextmanager
async def caretaking(
    bench: Bench, name: str, *has: str
) -> AsyncIterator[tuple[Caretaker, asyncio.Task[None]]]:
    upkeep, destinations = bench.upkeep(), [Destination(one, "console:") for one in has]
    caretaker = Caretaker(upkeep, destinations, member(name), Fast(), new_tally(name))
    task = asyncio.create_task(caretaker.run())
    try:
        yield caretaker, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_of_two_caretakers_one_leads_and_the_other_follows_when_it_is_killed(bench: Bench) -> None:
    async with caretaking(bench, "a") as (a, task_of_a), caretaking(bench, "b") as (b, task_of_b):
        await await_for(lambda: a.leadership.term or b.leadership.term)
        await await_for(lambda: len(a.membership.alive) == len(b.membership.alive) == 2)
        assert (a.leadership.term is None) != (b.leadership.term is None)
        killed, task, survivor = (a, task_of_a, b) if a.leadership.term else (b, task_of_b, a)
        term = killed.leadership.term
        assert term is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert survivor.leadership.term is None
        bench.age(bench.tables.leader.c.leads_until, 16)
        assert await await_for(lambda: survivor.leadership.term) == term + 1


async def test_a_limit_is_divided_among_the_relays_that_have_the_destination(bench: Bench) -> None:
    async with caretaking(bench, "a", "mail") as (a, _), caretaking(bench, "b", "mail", "shop") as (b, _):
        await await_for(
            lambda: b.membership.share("shop", 1) == 1, "the other one lacks it, and takes no part"
        )
        await await_for(lambda: (a.membership.share("mail", 3), b.membership.share("mail", 3)) == (2, 1))
        upkeep = bench.upkeep()

        async def counts_one_that_says_nothing() -> bool:
            await upkeep.members.beat(member("0"), LIVE)
            return "0" in b.membership.alive and b.membership.share("shop", 1) == 0

        await await_for(counts_one_that_says_nothing, "one of the last release may have it")


async def test_a_relay_has_said_what_it_has_when_the_others_first_see_it(bench: Bench) -> None:
    async def watched(*given: Any, **options: Any) -> Beat:
        known.append(await upkeep.reports.known())
        return await beat(*given, **options)

    upkeep = bench.upkeep()
    beat = upkeep.members.beat
    upkeep.members.beat = watched  # type: ignore[method-assign]
    known: list[dict[str, frozenset[str]]] = []
    shop = Destination("shop", "console:")
    caretaker = Caretaker(upkeep, [shop], member("a"), Fast(), new_tally("a"))
    await caretaker.membership.join()
    assert known == [{"a": frozenset({"shop"})}]


async def test_a_caretaker_that_stops_resigns_and_leaves(bench: Bench) -> None:
    async with caretaking(bench, "a") as (caretaker, task):
        await await_for(lambda: caretaker.leadership.term)
        caretaker.stop()
        await asyncio.wait_for(task, 60)
        assert bench.column(bench.tables.relay.c.name) == []
        assert await bench.upkeep().members.lead("b", 60.0) is not None
        assert caretaker.leadership.term is None
        assert caretaker.membership.share("shop", 10) == 0


async def test_a_clock_of_a_process_that_jumps_changes_nothing(bench: Bench) -> None:
    term = await leading(bench.upkeep(), "one")
    row = bench.put("shop", "delivered", age=DAY)

    class Jumped(MonotonicClock):
        def now(self) -> float:
            return super().now() + 1e9

    upkeep, shop = bench.upkeep(), Destination("shop", "console:")
    tally = Tally("two", DatabaseTime(Jumped(), lambda: datetime(2200, 1, 1, tzinfo=UTC)))
    far = Caretaker(upkeep, [shop], member("two"), Jumped(), tally)
    assert (await far.once()).pruned is None
    await far.membership.join()
    assert (await upkeep.members.beat(member("three"), LIVE)).alive == ("three", "two")
    assert await upkeep.members.lead("one", 60.0) == term
    assert bench.ids() == {row}


async def test_nobody_follows_a_leader_in_the_middle_of_what_it_does(bench: Bench) -> None:
    """The lease of a leader runs out while it waits for a lock: the next term begins when it is done."""
    if not bench.locks_rows:
        pytest.skip("SQLite has one writer at a time anyway")
    upkeep, other, audit = bench.upkeep(), bench.upkeep(), bench.tables.audit
    old = datetime(2020, 1, 1, tzinfo=UTC)
    bench.execute(sa.insert(audit).values(actor="ann", action="retry", details={}, at=old))
    with bench.engine.begin() as connection:
        connection.execute(sa.select(audit).with_for_update())
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("LOCK TABLE outbox_audit IN EXCLUSIVE MODE"))
        term, pruning = await prune_that_waits(bench, upkeep)
        following = asyncio.create_task(follow(other))
        await await_for(lambda: waiters(bench.engine) == 2, "the next leader waits for the prune")
        assert not pruning.done()
    assert await pruning is not None, "it led when it began"
    assert await following == term + 1


async def prune_that_waits(bench: Bench, upkeep: SqlUpkeep) -> tuple[int, asyncio.Task[int | None]]:
    """Begin to prune under a lease that runs out soon, but not before it has begun."""
    for seconds in (1.0, 10.0, 60.0):
        term = some(await upkeep.members.lead("one", seconds))
        pruning = asyncio.create_task(upkeep.prune.history(term, "audit", 400 * DAY, 10))
        await await_for(lambda task=pruning: task.done() or waiters(bench.engine), "the prune waits")
        if not pruning.done():
            break
    return term, pruning


async def follow(upkeep: SqlUpkeep) -> int:
    return int(await await_for(lambda: upkeep.members.lead("other", 60.0)))


async def test_once_prunes_and_sweeps_and_lets_others_lead(bench: Bench) -> None:
    bench.put("shop", "delivered", age=DAY)
    bench.park("shop", "k")
    caretaker = Caretaker(
        bench.upkeep(),
        [Destination("shop", "console:", ordered=True, retention=0)],
        member("a"),
        MonotonicClock(),
        new_tally("a"),
    )
    chores = await caretaker.once()
    assert chores.pruned is not None
    assert chores.swept is not None
    assert (chores.pruned.changed, chores.swept.changed) == (1, 1)
    assert await bench.upkeep().members.lead("b", 60.0) is not None


async def test_counts_take_the_place_of_what_was_written_before(bench: Bench) -> None:
    upkeep = bench.upkeep()
    minute = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    for delivered, lag in ((1, {0: 1}), (3, {0: 1, 12: 2})):
        rows = [Minute(minute, name, "r", delivered, 4, 5, lag) for name in ("shop", "other")]
        await upkeep.record(rows)
        await upkeep.record(rows)
    with bench.engine.connect() as connection:
        found = connection.execute(sa.select(bench.tables.stats)).all()
    assert {(row.destination, row.delivered, row.retried, row.failed) for row in found} == {
        ("shop", 3, 4, 5),
        ("other", 3, 4, 5),
    }
    assert found[0].lag == {"0": 1, "12": 2}
    assert found[0].minute.replace(tzinfo=UTC) == minute


async def test_what_the_database_refuses_is_a_store_error(bench: Bench) -> None:
    with pytest.raises(StoreError):
        await bench.upkeep().members.beat(Member("a", "h", 1, None), LIVE)  # type: ignore[arg-type]
