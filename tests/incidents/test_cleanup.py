"""Cleanup removes what was delivered long ago, and whatever else is as old."""

from __future__ import annotations

import pytest

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination
from relaybox.database.statements import upkeep as upkeep_statements
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.prune import Prune
from tests.incidents.conftest import BOTH_WAYS, Case, variants
from tests.integration.upkeep.bench import LONG_AGO, Bench, go_on, leading


def by_age(case: Case) -> None:
    """Delete old rows in any state."""
    old = ("status = 'delivered' AND delivered_at <", "created_at <")
    any_order = ("AND delivered_at >= :since", "")
    for texts in (upkeep_statements.POSTGRESQL, upkeep_statements.MYSQL, upkeep_statements.SQLITE):
        case.rewrite(texts, "delivered", old, any_order, ("ORDER BY delivered_at", "ORDER BY id"))


@pytest.mark.parametrize("kind", BOTH_WAYS)
@variants("removal by age alone")
async def test_cleanup_deletes_undelivered_rows(case: Case, kind: str) -> None:
    if case.broken:
        by_age(case)
    url = case.database(kind)
    bench = Bench(url)
    undelivered = {
        bench.put("shop", age=LONG_AGO),
        bench.park("shop", "key", age=LONG_AGO),
        bench.put("shop", "failed", age=LONG_AGO, ordering_key="key"),
    }
    delivered = bench.put("shop", "delivered", age=LONG_AGO)
    upkeep = bench.upkeep()
    shop = Destination("shop", "console:", retention="1d")
    prune = Prune(upkeep.prune, Agreement(upkeep.reports, [shop], "me"), MonotonicClock(), go_on)
    await prune(await leading(upkeep))
    left = bench.ids()
    for store in bench.stores:
        await store.close()
    bench.engine.dispose()
    with case.check("undelivered rows are gone"):
        assert undelivered <= left, "undelivered rows are gone"
    assert delivered not in left
