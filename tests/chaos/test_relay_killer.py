"""An event that ends the process of its relay each time: it is failed, and takes nobody with it."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tests.chaos.mortal_relay import KILLED, POISON, Plan
from tests.chaos.test_relay_deaths import ended, relay
from tests.integration.shop import Shop, until

EVENTS = 20
MAX_ATTEMPTS = 2
OPTIONS: dict[str, Any] = {
    "max_attempts": MAX_ATTEMPTS,
    "lease": "1s",
    "timeout": "1s",
    "poll_interval": "20ms",
    "backoff": {"base": "10ms", "cap": "50ms"},
}


class Supervised:
    """A relay that is started again whenever it died."""

    def __init__(self, plan: Plan, shop: Shop) -> None:
        self._plan = plan
        self._shop = shop
        self.deaths = 0
        self.taken: Counter[tuple[str, int]] = Counter()

    async def run(self) -> None:
        """Until every row is final."""
        while True:
            with relay(self._plan) as process:
                await until(lambda: self._final(process), "every row final, or the relay dead", 30)
                if process.poll() is None:
                    process.terminate()
                status = await ended(process)
                assert process.stdout is not None
                self.taken.update(tuple(msgspec.json.decode(line)) for line in process.stdout)
            if status == 0:
                return
            assert status == KILLED
            self.deaths += 1
            assert self.deaths <= 3 * MAX_ATTEMPTS, "it dies and dies"

    def _final(self, process: subprocess.Popen[bytes]) -> bool:
        return process.poll() is not None or "pending" not in self._shop.states()


def make_shop(url: str, sinks: dict[str, str], **options: Any) -> tuple[Plan, Shop]:
    plan = Plan(url, sinks, OPTIONS | options)
    settings = plan.outbox().settings
    shop = Shop(url, destinations=settings.destinations, routes=settings.routes)
    shop.emit(EVENTS, keys=5)
    return plan, shop


def not_delivered(shop: Shop) -> list[tuple[str, int, str, str]]:
    event = shop.outbox.tables.event.c
    query = sa.select(event.destination, event.payload, event.status, event.error_message)
    with shop.engine.connect() as connection:
        rows = connection.execute(query.where(event.status != "delivered").order_by(event.destination))
        return [(name, payload["n"], status, error) for name, payload, status, error in rows]


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
async def test_an_event_that_kills_its_relay_is_failed_and_all_others_are_delivered(
    ordered: bool, fresh_database: Callable[[str], str]
) -> None:
    sinks = {"kills": "kill", "dawdles": "dawdle"}
    on_failed = {"on_failed": "skip"} if ordered else {}
    plan, shop = make_shop(fresh_database("postgresql-18"), sinks, ordered=ordered, **on_failed)
    supervised = Supervised(plan, shop)
    await supervised.run()
    # The first two deaths are a whole batch's, and count for nobody.
    assert supervised.deaths == MAX_ATTEMPTS + 2
    reason = f"the relay died {MAX_ATTEMPTS + 2} times while it held this event"
    assert not_delivered(shop) == [("kills", POISON, "failed", reason)]
    expected = {(name, n) for name in sinks for n in range(EVENTS)} - {("kills", POISON)}
    assert set(supervised.taken) == expected


def blamed(shop: Shop) -> dict[str, int]:
    """For each destination, how many deaths its rows were charged with."""
    event = shop.outbox.tables.event.c
    deaths = sa.func.sum(sa.case((event.status == "failed", event.attempts), else_=event.attempts - 1))
    with shop.engine.connect() as connection:
        query = sa.select(event.destination, deaths).group_by(event.destination)
        return {name: int(count) for name, count in connection.execute(query)}


@pytest.mark.slow
async def test_lanes_with_suspects_at_the_same_time_blame_only_the_one_that_kills(
    fresh_database: Callable[[str], str],
) -> None:
    """The others are in flight at every death, and would be suspected each time."""
    sinks = {"kills": "kill", **{f"other {n}": "dawdle" for n in range(4)}}
    plan, shop = make_shop(fresh_database("postgresql-18"), sinks, max_attempts=4)
    supervised = Supervised(plan, shop)
    await supervised.run()
    assert [row[:3] for row in not_delivered(shop)] == [("kills", POISON, "failed")]
    assert {key for key in supervised.taken if key[0] != "kills"} == {
        (name, n) for name in sinks if name != "kills" for n in range(EVENTS)
    }
    assert blamed(shop) == {"kills": 4, **{name: 0 for name in sinks if name != "kills"}}
