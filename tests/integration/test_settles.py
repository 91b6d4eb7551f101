"""Settles on PostgreSQL of several leases at once, and whether they leave something to be claimed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from relaybox.event import Delivery
from relaybox.outcome import Delivered
from relaybox.schema import Tables
from relaybox.store import Settlement, Want
from relaybox.stores.sql import SqlStore
from relaybox.stores.steps import LEASES_APART
from tests.integration.filled import create_tables, emit
from tests.integration.shop import Databases
from tests.integration.test_pipeline import column, opened

EVENTS = 12
NEXT = Want("keys", "me", limit=1, ordered=True, spread=1)


@dataclass
class Statement:
    """Notes which statements settles are made of."""

    names: list[str]

    def watch(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        statements, names = store.steps.statements, self.names
        original = type(statements).__call__

        def noting(self: object, name: str, **params: object) -> object:
            if name.startswith(("deliver", "delete", "lock_rows")):
                names.append(name)
            return original(statements, name, **params)

        monkeypatch.setattr(type(statements), "__call__", noting)


def one_after_the_other(deliveries: Sequence[Delivery], leases: int) -> list[list[Delivery]]:
    size = len(deliveries) // leases
    return [list(deliveries[start : start + size]) for start in range(0, len(deliveries), size)]


def in_turns(deliveries: Sequence[Delivery], leases: int) -> list[list[Delivery]]:
    return [list(deliveries[first::leases]) for first in range(leases)]


def make_leases(engine: sa.Engine, tables: Tables, parts: Sequence[Sequence[Delivery]]) -> list[Delivery]:
    """Give the rows of each part a token of their own; the deliveries that have them."""
    held = []
    for part in parts:
        with engine.begin() as connection:
            token = connection.scalar(sa.select(sa.func.gen_random_uuid()))
            event = tables.event
            ids = [delivery.id for delivery in part]
            connection.execute(event.update().where(event.c.id.in_(ids)).values(lease_token=token))
        for delivery in part:
            values = {name: getattr(delivery, name) for name in Delivery.__struct_fields__}
            held.append(Delivery(**values | {"lease_token": token}))
    return held


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "deleted"])
@pytest.mark.parametrize(
    ("split", "leases", "statements"),
    [
        (one_after_the_other, 1, 1),
        (one_after_the_other, LEASES_APART, LEASES_APART),
        (one_after_the_other, EVENTS, 1),
        (in_turns, 2, 1),
    ],
    ids=["one lease", "a few leases", "many leases", "leases that mingle"],
)
async def test_leases_are_settled_together_and_only_what_is_still_held(
    migrated_database: Databases,
    monkeypatch: pytest.MonkeyPatch,
    split: Callable[[Sequence[Delivery], int], list[list[Delivery]]],
    leases: int,
    statements: int,
    keep: bool,
) -> None:
    url = migrated_database("postgresql-18")
    engine, tables = create_tables(url)
    emit(engine, tables, EVENTS)
    async with opened(url, tables) as store:
        claim = await store.claim(Want("plain", "me", limit=EVENTS))
        held = make_leases(engine, tables, split(claim.deliveries, leases))
        event = tables.event
        taken = held[-1]
        with engine.begin() as connection:
            stolen = event.update().values(lease_token=sa.func.gen_random_uuid())
            connection.execute(stolen.where(event.c.id == taken.id))
        statement = Statement([])
        statement.watch(store, monkeypatch)
        lost = await store.settle([Settlement(delivery, Delivered(keep=keep)) for delivery in held])
    assert lost == {taken.id}
    by_lease = leases <= LEASES_APART and split is one_after_the_other
    assert statement.names == [f"{'deliver' if keep else 'delete'}{'_lease' * by_lease}"] * statements
    left = column(engine, tables, "status", "plain")
    assert sorted(left) == [*["delivered"] * (EVENTS - 1) * keep, "pending"]


@pytest.mark.parametrize("parked", [True, False], ids=["put behind", "not looked at yet"])
async def test_a_settle_says_whether_the_next_of_a_key_can_be_claimed(
    migrated_database: Databases, parked: bool
) -> None:
    url = migrated_database("postgresql-18")
    engine, tables = create_tables(url)
    # One more than there are keys: the first key has two.
    emit(engine, tables, 6)
    async with opened(url, tables) as store:
        first, *others = [(await store.claim(NEXT)).deliveries[0] for _ in range(5)]
        if parked:
            assert (await store.claim(NEXT)).parked == 1
        told: list[str] = []
        await store.settle(
            [Settlement(other, Delivered()) for other in others], made_due=lambda: told.append("none")
        )
        assert told == [], "no other event of these keys is left"
        await store.settle([Settlement(first, Delivered())], made_due=lambda: told.append("one more"))
        assert told == ["one more"]
        [last] = (await store.claim(NEXT)).deliveries
        await store.settle([Settlement(last, Delivered())], made_due=lambda: told.append("none"))
        assert told == ["one more"]
