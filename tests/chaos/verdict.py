"""What a schedule came to: the truth of the business rows, the outbox's rows and the receiver's record."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from relaybox.signature import verify
from relaybox.testing.checker import Committed, Excuses, Received, Report, check
from tests.chaos.receiver import Applied
from tests.chaos.workload import LOOSE, ORDERED, SECRET, Rows, event_type, written

ANY_TIME = 1e12
"""Seconds: relays with a wrong clock sign a wrong time, and the signature holds all the same."""


class Verdict(NamedTuple):
    """The checker's report, and what only the business rows can tell: by kind, in words."""

    report: Report
    events: int
    others: tuple[tuple[str, str], ...]

    @property
    def findings(self) -> Counter[str]:
        counts: Counter[str] = Counter({"not atomic": 0, "failed": 0})
        for kind, number in self.report.counts.items():
            counts[kind] += number
        counts.update(kind for kind, _ in self.others)
        return counts

    @property
    def words(self) -> list[str]:
        return [*map(str, self.report.findings), *(f"{kind}: {text}" for kind, text in self.others)]


def judge(
    rows: Rows,
    applied: Sequence[Applied],
    bound: Excuses,
    *,
    kept: bool = True,
    elsewhere: Mapping[str, Sequence[Received]] | None = None,
) -> Verdict:
    """Compare what was committed with what arrived; every row is expected to be delivered.

    ``kept``: rows that were delivered are still there. ``elsewhere``: what arrived at ordered destinations
    beside the receiver's, each of which gets every event.
    """
    beside = elsewhere or {}
    orders = {UUID(order.event_id): order for order in rows.orders()}
    events = rows.events()
    # Not the rows' own positions, which are judged by themselves: of some there is no row any more.
    in_order = enumerate(sorted(orders.items(), key=lambda item: item[1].n))
    committed = [
        Committed(name, event_id, order.name, position, order.payload.encode())
        for position, (event_id, order) in in_order
        for name in (*destinations(order.n), *beside)
    ]
    status = {(event.destination, event.event_id): event.status for event in events}
    keyed = [row._replace(key=None) if row.destination == LOOSE else row for row in committed]
    arrived = [*map(received, applied), *(one for several in beside.values() for one in several)]
    report = check(keyed, arrived, status=status, in_flight=bound)
    others = (*_not_atomic(orders, events, kept, tuple(beside)), *_not_final(events))
    return Verdict(report, len(orders), others)


def destinations(n: int) -> list[str]:
    """Where the n-th event of a key goes."""
    return [ORDERED, LOOSE] if event_type(n) == "order.loud" else [ORDERED]


def received(applied: Applied) -> Received:
    signed = verify(applied.body, applied.headers, SECRET, tolerance=ANY_TIME, now=0)
    return Received(applied.endpoint, UUID(applied.headers["webhook-id"]), payload_of(applied.body), signed)


def payload_of(message: bytes) -> bytes:
    """What an envelope carries, as the business row keeps it."""
    body = msgspec.json.decode(message)
    payload = base64.b64decode(body["data_base64"]) if "data_base64" in body else body["data"]
    return written(payload).encode()


def _not_atomic(
    orders: dict[UUID, Any], events: list[Any], kept: bool, beside: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Events and orders belong together one to one; so do the orders of their positions and numbers."""
    wanted = {
        (name, event_id) for event_id, order in orders.items() for name in (*destinations(order.n), *beside)
    }
    found = Counter((event.destination, event.event_id) for event in events)
    for pair, count in (found - Counter(wanted)).items():
        yield "not atomic", f"{count} rows too many of {pair}"
    if not kept:
        return
    for pair in wanted - found.keys():
        yield "not atomic", f"an order without the row {pair}"
    numbers: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.destination == ORDERED and event.event_id in orders:
            numbers[event.aggregate_id].append(orders[event.event_id].n)
    for name, seen in numbers.items():
        if seen != list(range(1, len(seen) + 1)):
            yield "not atomic", f"by position the orders of {name} are {seen}"


def _not_final(events: list[Any]) -> Iterator[tuple[str, str]]:
    for event in events:
        if event.status == "failed":
            yield "failed", f"{event.destination} {event.event_id}, though nothing here may fail for good"
        if event.lease_token is not None:
            yield "stuck", f"{event.destination} {event.event_id} is still leased"
