"""What a relay knows of its own health."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from relaybox.errors import StoreError
from relaybox.operate.observers.flow import PATIENCE, Flow
from relaybox.stores.store import Claim, Held


class Watched:
    """A flow and its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.flow = Flow(lambda: self.now)

    @property
    def stops(self) -> list[tuple[Any, ...]]:
        return [astuple(stop) for stop in self.flow.stops()]


@pytest.fixture
def relay() -> Watched:
    return Watched()


def test_an_open_circuit_stops_it_until_it_is_closed(relay: Watched) -> None:
    relay.flow.circuit("runner", "open", "refused")
    relay.now += 7
    relay.flow.circuit("runner", "half_open", "")
    relay.flow.circuit("runner", "open", "refused")
    assert relay.stops == [("runner", "its circuit is open", 7.0)]
    relay.flow.trouble("mail", "run", ValueError())
    assert [stop.destination for stop in relay.flow.stops(circuits=False)] == ["mail"]
    relay.flow.claimed("mail", Claim())
    relay.flow.circuit("runner", "closed", "")
    assert relay.stops == []


def test_a_circuit_that_another_relay_opened_is_seen_by_claims(relay: Watched) -> None:
    held = Claim(held=Held("open", 5.0, "refused"))
    relay.flow.claimed("runner", held)
    relay.flow.claimed("runner", Claim())
    assert [stop[0] for stop in relay.stops] == ["runner"]
    relay.flow.claimed("runner", held)
    relay.flow.claimed("runner", Claim())
    assert [stop[0] for stop in relay.stops] == ["runner"]
    relay.flow.claimed("runner", Claim())
    assert relay.stops == []


def test_a_pause_is_meant(relay: Watched) -> None:
    relay.flow.circuit("runner", "paused", "410")
    relay.flow.claimed("runner", Claim(held=Held("paused", None, "tea")))
    assert relay.stops == []


def test_a_database_that_stays_away_stops_it(relay: Watched) -> None:
    relay.flow.trouble("runner", "claim", StoreError("gone"))
    assert relay.stops == []
    relay.now += PATIENCE
    relay.flow.trouble("other", "settle", StoreError("gone"))
    assert relay.stops == [(None, "the database refuses or does not answer", PATIENCE)]
    relay.flow.claimed("runner", Claim())
    assert relay.stops
    relay.now += PATIENCE
    relay.flow.settled("runner", [], frozenset())
    assert relay.stops == []


def test_a_lane_that_failed_stops_it_until_it_claims_again(relay: Watched) -> None:
    relay.flow.trouble("runner", "send", ValueError("oops"))
    assert relay.stops == []
    relay.flow.trouble("runner", "run", ValueError("oops"))
    assert [stop[0] for stop in relay.stops] == ["runner"]
    relay.flow.claimed("runner", Claim())
    assert relay.stops == []
