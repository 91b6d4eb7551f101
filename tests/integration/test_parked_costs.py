"""On MariaDB parked rows come first in the index of what is due: looking for due ones does not read them."""

from __future__ import annotations

from relaybox.emit.row import Call
from relaybox.ledger import CAP
from relaybox.stores.statements import Query
from tests.integration.operated import Operated
from tests.integration.shop import Databases

PARKED = 12_000
DUE = 100
LIMIT = 20
LOOKED_AT = Query("SHOW GLOBAL STATUS LIKE 'Handler_icp_attempts'", ())


async def looked_at(operated: Operated) -> int:
    def steps():
        return (yield [LOOKED_AT])

    [[[_, count]]] = await operated.store.driver.run(steps)
    return int(count)


def fill(operated: Operated) -> None:
    calls = [
        Call("Order", destinations=("shop",), aggregate_id=number, event_type="order.paid", payload={})
        for number in range(DUE + PARKED)
    ]
    rows = [row for call in calls for row in operated._builder.build(call, operated.dialect).rows]
    with operated.engine.begin() as connection:
        for start in range(0, len(rows), 500):
            query = operated.statements.insert(rows[start : start + 500])
            connection.exec_driver_sql(query.sql, query.params)
        parked = "UPDATE outbox_event SET next_attempt_at = NULL, ordering_key = 'one' WHERE position > %s"
        connection.exec_driver_sql(parked, (DUE,))
        connection.exec_driver_sql("ANALYZE TABLE outbox_event")


async def test_parked_rows_cost_a_claim_and_a_count_nothing(fresh_database: Databases) -> None:
    operated = Operated(fresh_database("mariadb"))
    try:
        fill(operated)
        before = await looked_at(operated)
        claim = await operated.claim("shop", limit=LIMIT)
        between = await looked_at(operated)
        stats = await operated.admin.stats()
        after = await looked_at(operated)
    finally:
        await operated.close()
    assert len(claim.deliveries) == LIMIT
    assert between - before < 10 * DUE
    assert stats.total.parked == CAP
    assert after - between < CAP + 10 * DUE
