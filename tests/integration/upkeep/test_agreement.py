"""Relays with different settings: upkeep of destinations that a relay does not know, or knows otherwise."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination
from relaybox.operate.open_relay import new_tally
from relaybox.relay.upkeep.agreement import SILENT, Agreement
from relaybox.relay.upkeep.caretaker import Caretaker, Chores
from relaybox.relay.upkeep.sweep import Sweep
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Setting
from tests.integration.upkeep.bench import DAY, LIVE, LONG_AGO, Bench, go_on, member

MAIL = Destination("mail", "console:", retention="1d")
SHOP = Destination("shop", "console:", retention="30d", ordered=True)
WEEK = Setting(7 * DAY, False, "skip")


async def tend(upkeep: SqlUpkeep, name: str, *destinations: Destination) -> Chores:
    """Do one round of each job as the leader, with these destinations."""
    care = Caretaker(upkeep, destinations, member(name), MonotonicClock(), new_tally(name))
    return await care.once()


async def agree(upkeep: SqlUpkeep, name: str, *destinations: Destination) -> dict[str, Setting]:
    return await Agreement(upkeep.reports, destinations, name)()


def shorten(destination: Destination, retention: str) -> Destination:
    return Destination(destination.name, destination.sink, retention=retention, ordered=destination.ordered)


async def test_a_leader_prunes_by_the_retention_of_the_relay_that_has_the_destination(bench: Bench) -> None:
    upkeep = bench.upkeep()
    await agree(upkeep, "one", SHOP)
    kept = bench.put("shop", "delivered", age=20 * DAY), bench.put("shop", "discarded", age=20 * DAY)
    for status in ("delivered", "discarded"):
        bench.put("shop", status, age=40 * DAY)
    chores = await tend(upkeep, "two", MAIL)
    assert chores.pruned is not None
    assert chores.pruned.changed == 2
    assert bench.ids() == set(kept)


async def test_a_leader_sweeps_a_destination_that_only_another_relay_has(bench: Bench) -> None:
    upkeep = bench.upkeep()
    await agree(upkeep, "one", SHOP)
    stuck, unknown = bench.park("shop", "k"), bench.park("unknown", "k")
    await tend(upkeep, "two", MAIL)
    assert stuck not in bench.parked()
    assert unknown in bench.parked(), "nobody knows whether it is ordered"


async def test_of_two_retentions_the_longer_holds_whichever_relay_leads(bench: Bench) -> None:
    upkeep = bench.upkeep()
    old, new = SHOP, shorten(SHOP, "1d")
    row = bench.put("shop", "delivered", age=20 * DAY)
    await agree(upkeep, "old", old)
    await tend(upkeep, "new", new)
    await tend(upkeep, "old", old)
    assert bench.ids() == {row}
    bench.age(bench.tables.setting.c.said_at, SILENT + 1)
    await tend(upkeep, "new", new)
    assert bench.ids() == set(), "the relay with the longer one is gone"
    assert [one.setting.retention for one in await upkeep.reports.read()] == [DAY]


async def test_where_relays_differ_what_is_parked_stays_until_they_agree(bench: Bench) -> None:
    upkeep = bench.upkeep()
    head = bench.put("shop", "failed", ordering_key="k")
    parked = bench.park("shop", "k")
    skipping = Destination("shop", "console:", ordered=True, on_failed="skip")
    await agree(upkeep, "one", SHOP)
    for settings in (skipping, Destination("shop", "console:")):
        await Sweep(upkeep.sweep, Agreement(upkeep.reports, [settings], "two"), MonotonicClock(), go_on)()
        assert bench.parked() == {parked}
    assert bench.ids() == {head, parked}
    bench.age(bench.tables.setting.c.said_at, SILENT + 1)
    await Sweep(upkeep.sweep, Agreement(upkeep.reports, [skipping], "two"), MonotonicClock(), go_on)()
    assert bench.parked() == set()


async def test_what_was_said_last_holds_where_nobody_runs_that_has_the_destination(bench: Bench) -> None:
    upkeep = bench.upkeep()
    await agree(upkeep, "one", SHOP)
    await agree(upkeep, "two", shorten(SHOP, "1d"))
    bench.age(bench.tables.setting.c.said_at, LONG_AGO)
    assert await agree(upkeep, "three", MAIL) == {
        "mail": Setting(DAY, False, "skip"),
        "shop": Setting(30 * DAY, True, "block"),
    }
    assert len(await upkeep.reports.read()) == 3, "one that does not know a destination forgets nothing of it"


async def test_what_runs_says_it_again_and_what_ends_soon_only_if_nobody_else_does(bench: Bench) -> None:
    upkeep = bench.upkeep()
    for name in ("one", "two"):
        await agree(upkeep, name, SHOP, MAIL)
    assert [(one.destination, one.relay) for one in await upkeep.reports.read()] == [
        ("mail", "one"),
        ("shop", "one"),
    ]
    running = Agreement(upkeep.reports, [SHOP], "running")
    running.runs = True
    for _ in range(2):
        await running()
        bench.age(bench.tables.setting.c.said_at, 61)
        await running()
    said = {(one.destination, one.relay): one.age for one in await upkeep.reports.read()}
    assert said.pop(("shop", "running")) < 60 <= min(said.values())
    assert sorted(said) == [("mail", "one"), ("shop", "one")]


async def test_what_was_said_again_meanwhile_is_not_forgotten(bench: Bench) -> None:
    upkeep = bench.upkeep()
    await upkeep.reports.write("one", {"shop": WEEK}, [])
    bench.age(bench.tables.setting.c.said_at, SILENT + 1)
    outdated = await upkeep.reports.read()
    await upkeep.reports.write("one", {"shop": WEEK}, [])
    await upkeep.reports.write("two", {}, outdated)
    assert [one.setting for one in await upkeep.reports.read()] == [WEEK]


async def test_nothing_is_forgotten_that_a_member_said(bench: Bench) -> None:
    """The others would take what is left of it for all the destinations that it has."""
    upkeep = bench.upkeep()
    await upkeep.reports.write("one", {"mail": WEEK, "shop": WEEK}, [])
    await upkeep.members.beat(member("one"), LIVE)
    bench.age(bench.tables.setting.c.said_at, SILENT + 1)
    await agree(upkeep, "two", SHOP)
    assert await upkeep.reports.known() == {"one": {"mail", "shop"}, "two": {"shop"}}
    await upkeep.members.leave("one")
    await agree(upkeep, "two", SHOP)
    assert await upkeep.reports.known() == {"one": {"mail"}, "two": {"shop"}}


async def test_a_relay_that_stops_says_nothing_any_more_but_what_it_said_is_not_forgotten(
    bench: Bench,
) -> None:
    upkeep = bench.upkeep()
    await agree(upkeep, "one", SHOP)
    await upkeep.reports.outdate("one")
    [said] = await upkeep.reports.read()
    assert said.age > SILENT
    assert await agree(upkeep, "two", MAIL) == {"mail": Setting(DAY, False, "skip"), "shop": said.setting}
    assert (await agree(upkeep, "three", shorten(SHOP, "1d")))["shop"].retention == DAY
    assert [one.relay for one in await upkeep.reports.read()] == ["two", "three"]


async def test_what_a_later_release_says_in_other_words_is_left_alone(bench: Bench) -> None:
    upkeep = bench.upkeep()
    for setting in ({"retention": 5, "ordered": False, "on_failed": "skip", "more": 1}, {"keep": 5}, 7):
        values = {"destination": "shop", "setting": setting, "relay": f"later {setting}"}
        bench.execute(sa.insert(bench.tables.setting).values(**values))
    assert [one.setting for one in await upkeep.reports.read()] == [Setting(5.0, False, "skip")]
    await agree(upkeep, "me", SHOP)
    assert len(bench.column(bench.tables.setting.c.setting)) == 4


async def test_on_tables_of_the_version_before_a_relay_keeps_to_what_it_knows(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    upkeep = bench.upkeep()
    stuck = bench.park("mail", "k"), bench.park("shop", "k")
    bench.put("mail", "delivered", age=LONG_AGO)
    bench.execute(sa.text("ALTER TABLE outbox_setting RENAME TO hidden"))
    try:
        await tend(upkeep, "me", MAIL)
    finally:
        bench.execute(sa.text("ALTER TABLE hidden RENAME TO outbox_setting"))
    assert bench.ids() == set(stuck)
    assert bench.parked() == {stuck[1]}
    assert "upkeep uses only its own" in caplog.text


async def test_that_relays_differ_is_said_once_and_that_they_agree_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    upkeep = bench.upkeep()
    one, two = (
        Agreement(upkeep.reports, [SHOP], "one"),
        Agreement(upkeep.reports, [shorten(SHOP, "1d")], "two"),
    )
    for agreement in (one, two, one, two):
        await agreement()
    [first, second] = [record.getMessage() for record in caplog.records if "differ" in record.msg]
    assert "'shop': one has retention = '30d', ordered, on_failed = 'block'; " in first
    assert "two has retention = '1d', ordered" in first
    assert first.endswith("upkeep goes by retention = '30d', ordered, on_failed = 'block'")
    assert "differ" in second
    bench.age(bench.tables.setting.c.said_at, SILENT + 1)
    await one()
    assert caplog.messages[-1] == "relays agree on the settings of 'shop' again"
