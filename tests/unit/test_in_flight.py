"""What a lane has in flight, as rows are settled, lost, and claimed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

import pytest
from msgspec.structs import replace

from relaybox.relay.batch import Batch, InFlight
from relaybox.testing.sink_contract import make_delivery


@dataclass
class Held:
    """An in-flight list, and how often it said that it changed."""

    changes: int = 0
    list: InFlight = field(init=False)

    def __post_init__(self) -> None:
        self.list = InFlight(self.changed)

    def changed(self) -> None:
        self.changes += 1


@pytest.fixture
def held() -> Held:
    return Held()


def claimed(*positions: int) -> Batch:
    token = uuid4()
    rows = [replace(make_delivery(), position=position, lease_token=token) for position in positions]
    return Batch(rows, until=0.0)


def test_a_batch_is_done_when_all_of_it_is_settled(held: Held) -> None:
    batch = claimed(1, 2)
    held.list.add(batch)
    held.list.drop(batch.deliveries[:1])
    assert (len(held.list), list(held.list), batch.done.is_set()) == (1, [batch], False)
    held.list.drop(batch.deliveries[1:])
    assert (len(held.list), list(held.list), batch.done.is_set(), held.list.bytes) == (0, [], True, 0)


def test_what_is_settled_late_under_an_old_lease_leaves_the_new_one(held: Held) -> None:
    old, new = claimed(1), claimed(1)
    held.list.add(old)
    held.list.add(new)
    held.list.drop(old.deliveries)
    assert (list(held.list), list(new.unsettled)) == ([new], [1])


def test_a_row_that_this_relay_claims_again_is_no_longer_held_by_the_old_claim(held: Held) -> None:
    old, new = claimed(1, 2), claimed(2)
    held.list.add(old)
    held.list.add(new)
    assert (list(old.unsettled), old.done.is_set()) == ([1], False)
    held.list.drop([old.deliveries[0], *new.deliveries])
    assert (len(held.list), list(held.list), held.list.bytes) == (0, [], 0)
    assert old.done.is_set()
    assert new.done.is_set()
