"""Stores find their rows by index, and never look through more than a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim, DeadLetter, Settlement, Want
from tests.databases import POSTGRESQL
from tests.integration.plans.explaining import (
    BATCH,
    HEADS,
    IDS,
    PENDING,
    Database,
    Explained,
    each_database,
    indexes,
)

Open = Callable[..., Database]


OUTCOMES = (Delivered(), Delivered(keep=False), Retried(60.0, "busy"), Failed("refused"), Released())


class Seen(NamedTuple):
    """Whatever a store does, explained."""

    claim: list[Explained]
    ordered: list[Explained]
    one_key: list[Explained]
    parking: list[Explained]
    extend: list[Explained]
    settle: list[Explained]


def work(database: Database) -> Seen:
    """Do everything that a store does: without order, with many keys, and with a single key."""
    watch, steps = database.watch, database.steps
    whole, with_suspects = watch(steps.claim(Want("plain", "me", limit=BATCH)))
    claimed, claim = watch(steps.claim(Want("plain", "me", limit=BATCH, suspects=False)))
    first, ordered = watch(steps.claim(Want("keys", "me", limit=BATCH, ordered=True)))
    _, one_key = watch(steps.claim(Want("one", "me", limit=BATCH, ordered=True)))
    nothing, parking = watch(steps.claim(Want("one", "me", limit=BATCH, ordered=True)))
    held = (*claimed.deliveries, *first.deliveries)
    assert len(held) == 2 * BATCH
    assert nothing == Claim(parked=BATCH)
    extended, extend = watch(steps.extend(held, 60.0))
    assert not extended.lost
    outcomes = [Settlement(delivery, OUTCOMES[at % 5]) for at, delivery in enumerate(held)]
    settled, settle = watch(steps.settle(outcomes, "block", DeadLetter("grave")))
    assert not settled.lost
    delivered = [Settlement(delivery, Delivered()) for delivery in whole.deliveries]
    settled, settle_lease = watch(steps.settle(delivered, "block"))
    assert len(delivered) == BATCH
    assert not settled.lost
    light, claim_light = watch(steps.claim(Want("plain", "me", limit=BATCH, suspects=False, light=True)))
    assert light.deliveries
    settled, _ = watch(steps.settle([Settlement(one, Delivered()) for one in light.deliveries], "block"))
    assert not settled.lost
    settles = [*settle, *settle_lease]
    return Seen([*with_suspects, *claim, *claim_light], ordered, one_key, parking, extend, settles)


def assert_all_is_bounded(database: Database, seen: Seen) -> None:
    # A parking claim looks at the rows of the batch and at one head.
    database.assert_bounded(explained for operation in seen for explained in operation)
    assert indexes(seen.claim) == {PENDING, *database.OWN}
    for ordered in (seen.ordered, seen.one_key, seen.parking):
        assert indexes(ordered) == {PENDING, HEADS, *database.OWN}
    assert indexes(seen.extend) == {IDS}
    assert indexes(seen.settle) == {IDS, HEADS}


@each_database
def test_a_backlog_is_read_by_its_indexes(kind: str, analysed: bool, opened: Open) -> None:
    database = opened(kind, [] if kind in POSTGRESQL else [("keys", 20_000, 1000, "delivered")])
    database.fill_all(5_000 if kind in POSTGRESQL else 2_000)
    if analysed:
        database.analyse()
    assert_all_is_bounded(database, work(database))


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_statistics_from_before_the_backlog_do_no_harm(kind: str, opened: Open) -> None:
    database = opened(kind, [("keys", 20_000, 1000, "delivered")], analysed=True)
    database.fill_all(20_000)
    assert_all_is_bounded(database, work(database))


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_a_plan_kept_from_a_tiny_table_serves_a_large_one(kind: str, opened: Open) -> None:
    database = opened(kind, [("plain", BATCH, 0, "pending"), ("one", BATCH, 1, "pending")], cached=True)
    database.fill_all(BATCH)
    work(database)
    # Unlike TRUNCATE this makes no plan void.
    database.sql("DELETE FROM outbox_event")
    database.fill_all(35_000)
    assert_all_is_bounded(database, work(database))


@pytest.mark.full
def test_a_million_delivered_rows_are_not_looked_at(opened: Open) -> None:
    database = opened("postgresql-18", [("keys", 1_000_000, 1000, "delivered")])
    database.fill_all(2_000)
    assert_all_is_bounded(database, work(database))
    database.analyse()
    assert_all_is_bounded(database, work(database))
