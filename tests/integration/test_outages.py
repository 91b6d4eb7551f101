"""A destination that is down for longer than the whole retry budget, and one event that only looks so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from relaybox import Destination
from relaybox.core.outcome import Delivered, Outcome, Released, Retried
from relaybox.relay.observer import Observer
from relaybox.stores.store import Settlement
from tests.integration.receivers import answer
from tests.integration.runner import Runner, running
from tests.integration.shop import MEMBERSHIP, QUICK, SOON, Databases, Shop, in_order, shop_for
from tests.waiting import await_for

pytestmark = pytest.mark.full

EVENTS = 60
KEYS = 12
RATE = 50.0
AT_ONCE = 0.1
"""A batch is so many seconds' worth: the first one of each relay, and a probe, may go at once."""
TRIED = 4
"""Failed probes to wait for: with backoffs of 50 ms at most, three attempts would be used up long before."""


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    async with running() as runner:
        yield runner


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe an open circuit sooner, and let a second relay start work at once."""
    monkeypatch.setattr("relaybox.core.circuit.FIRST_PAUSE", 0.1)
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)


class Circuits(Observer):
    """Keeps every change of a circuit and every outcome."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.outcomes: list[tuple[int, Outcome]] = []

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self.outcomes += [
            (json.loads(delivery.payload or "{}")["n"], outcome) for delivery, outcome in settlements
        ]

    def rightly_given_back(self, n: int) -> int:
        """Return how many attempts an event had to get back.

        These are the attempts since whose last failure no other event was acknowledged.
        """
        given_back, acknowledged, before = 0, 0, None
        for number, outcome in self.outcomes:
            if isinstance(outcome, Delivered):
                acknowledged += 1
            elif number == n and not isinstance(outcome, Released):
                back = isinstance(outcome, Retried) and not outcome.counts
                assert back == (before in (None, acknowledged)), (n, self.outcomes)
                given_back, before = given_back + back, acknowledged
        return given_back

    def circuit(self, destination: str, state: str, reason: str) -> None:
        self.changes.append(state)


def make_shop(url: str, runner: Runner, **options: Any) -> Shop:
    settings = {"allow": ["127.0.0.0/8"], "max_attempts": 3, **QUICK, **options}
    return shop_for(url, Destination("runner", runner.url, **settings))


@asynccontextmanager
async def relays(shop: Shop, count: int = 1, *, patience: float = 5) -> AsyncIterator[Circuits]:
    """Run so many relays; yield what they report of the circuit."""
    seen = Circuits()
    async with AsyncExitStack() as running:
        for _ in range(count):
            await running.enter_async_context(shop.outbox.relay(patience=patience, observers=[seen]))
        yield seen


LEAST_SECONDS = EVENTS / RATE - 3 * AT_ONCE
"""What the events take under the rate limit, also of two relays, unless each had a limit of its own."""


@pytest.mark.parametrize(
    ("kind", "outage"),
    [
        *(("postgresql-18", outage) for outage in ("refused", "timeout", "401", "429")),
        pytest.param("postgresql-18", "503", marks=pytest.mark.fast),
        ("mariadb", "503"),
        pytest.param("sqlite", "refused", marks=pytest.mark.fast),
    ],
)
async def test_an_outage_fails_nothing_and_the_backlog_comes_back_under_the_rate_limit(
    kind: str, outage: str, runner: Runner, migrated_database: Databases, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old-secret")
    shop = make_shop(
        migrated_database(kind),
        runner,
        ordered=True,
        auth=f"file:{token}",
        # Once it is back, a busy machine must not make it late.
        timeout="1s" if outage == "timeout" else "30s",
        lease="30s",
        rate_limit=RATE,
        concurrency=5 if outage == "timeout" else 50,
    )
    runner.token = "new-secret" if outage == "401" else "old-secret"
    runner.down = outage
    if outage == "refused":
        await runner.refuse()
    shop.emit(EVENTS, keys=KEYS)
    async with relays(shop, 2) as seen:
        # A Retry-After of a second is waited for, so the probes are fewer.
        tried = 2 if outage == "429" else TRIED
        await await_for(
            lambda: seen.changes.count("half_open") >= tried, f"{tried} probes of a runner that is down"
        )
        assert shop.states() == {"pending": EVENTS}
        assert max(row[1] for row in shop.rows()) <= 1, "attempts were used up"
        runner.down = None
        if outage == "refused":
            await runner.listen()
        if outage == "401":
            token.write_text("new-secret")
        await await_for(
            lambda: shop.states() == {"delivered": EVENTS}, "everything delivered after the outage"
        )
    assert {row[:2] for row in shop.rows()} == {("delivered", 1)}
    assert shop.circuit("runner") == "closed"
    assert sorted(n for _, n, _ in runner.taken) == list(range(EVENTS)), "a duplicate without a fault"
    assert in_order((n for _, n, _ in runner.taken), KEYS)
    # From the first that arrived: the pause of the circuit before it must not hide a limit that is not kept.
    assert runner.taken[-1].at - runner.taken[0].at >= LEAST_SECONDS


@pytest.mark.parametrize("kind", ["postgresql-18", "sqlite"])
@pytest.mark.parametrize("count", [1, 5])
async def test_events_that_time_out_at_a_healthy_receiver_are_failed_and_hold_up_no_other(
    kind: str, count: int, runner: Runner, migrated_database: Databases
) -> None:
    runner.poison = frozenset(range(count))
    shop = make_shop(migrated_database(kind), runner, timeout="1s", lease="30s")
    shop.emit(count)
    requests: list[int] = []
    runner.on_request = requests.append
    async with relays(shop) as seen:
        for first in range(count, 10_000, 5):
            before = len(requests)
            shop.emit(5, first=first)
            healthy = range(first, first + 5)
            await await_for(lambda: {*healthy} <= {*requests}, "healthy events delivered")  # noqa: B023
            meanwhile = requests[before : max(map(requests.index, healthy))]
            # One claim may have been under way without them; the next takes them together with it.
            assert max(Counter(meanwhile).values()) <= 2, "the others waited for its retries"
            if shop.states().get("failed") == count:
                break
    rows = shop.rows()
    assert rows[:count] == [("failed", 3, f"no answer from 127.0.0.1:{runner.port} within 1s")] * count
    assert {row[:2] for row in rows[count:]} == {("delivered", 1)}
    for n in range(count):
        # The first time may be an outage for all that is known: it is given back, and three more are counted.
        assert runner.tries[n] == 3 + seen.rightly_given_back(n) >= 4
    # Five at once look like an outage, until a probe gets through.
    assert count > 1 or seen.changes == []


@pytest.mark.parametrize("kind", ["postgresql-18", pytest.param("sqlite", marks=pytest.mark.fast)])
async def test_others_are_delivered_while_events_hang(
    kind: str, runner: Runner, migrated_database: Databases
) -> None:
    runner.poison = frozenset(range(5))
    # None of them ends during the test.
    shop = make_shop(migrated_database(kind), runner, timeout="5m", lease="5m")
    shop.emit(5)
    async with relays(shop, patience=0) as seen:
        await await_for(lambda: runner.tries.total() == 5, "all hang")
        for count in (5, 10, 15):
            shop.emit(5, first=count)
            await await_for(lambda: shop.states().get("delivered") == count, "the others")  # noqa: B023
        assert all(n >= 5 for n, _ in seen.outcomes)
        assert {runner.tries[n] for n in range(20)} == {1}


@pytest.mark.parametrize(
    ("kind", "turns_away"),
    [
        ("postgresql-18", "at a loss"),
        ("postgresql-18", "with Retry-After"),
        ("sqlite", "every second request"),
    ],
)
async def test_a_receiver_that_turns_events_away_fails_none(
    kind: str, turns_away: str, runner: Runner, migrated_database: Databases
) -> None:
    after = ["Retry-After: 1"] if turns_away == "with Retry-After" else []
    later = answer("429 Too Many Requests", b"", *after)
    turns = cycle([later, None])
    if turns_away == "every second request":
        runner.throttle = lambda: next(turns)
    else:
        runner.throttle = lambda: later if runner.in_last_second() >= 30 else None
    shop = make_shop(migrated_database(kind), runner, timeout="30s", lease="30s")
    shop.emit(120)
    async with relays(shop):
        await await_for(lambda: "pending" not in shop.states(), "everything delivered or failed")
    assert shop.states() == {"delivered": 120}
