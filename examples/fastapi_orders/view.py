"""Where the orders and their events are, read from the tables of the outbox."""

from collections import defaultdict

import sqlalchemy as sa
from database import Order, Shipment
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from relaybox.database.schema import Tables

LATEST = 100


class Delivery(BaseModel):
    """An event on its way to Kafka: waiting, sending, delivered, failed or discarded."""

    event_id: str
    type: str
    state: str
    error: str | None


class Line(BaseModel):
    """An order as the page shows it."""

    id: int
    item: str
    quantity: int
    paid: bool
    shipments: int
    events: list[Delivery]


async def lines(session: AsyncSession, tables: Tables) -> list[Line]:
    """The latest orders, newest first."""
    shipments = (
        sa.select(sa.func.count()).where(Shipment.order_id == Order.id).scalar_subquery().label("shipments")
    )
    select = sa.select(Order.id, Order.item, Order.quantity, Order.paid, shipments)
    found = (await session.execute(select.order_by(Order.id.desc()).limit(LATEST))).mappings().all()
    events = await deliveries(session, tables, [row["id"] for row in found])
    return [Line(**row, events=events[str(row["id"])]) for row in found]


async def deliveries(session: AsyncSession, tables: Tables, ids: list[int]) -> dict[str, list[Delivery]]:
    """The events of each order, in their order; of an event that was replayed, the latest delivery."""
    event = tables.event.c
    select = sa.select(
        event.aggregate_id,
        event.event_id,
        event.event_type,
        event.status,
        event.error_message,
        (event.leased_until > sa.func.now()).label("leased"),
    )
    wanted = event.aggregate_id.in_([str(number) for number in ids])
    rows = await session.execute(
        select.where(event.aggregate_type == "Order", wanted).order_by(event.position)
    )
    found: dict[str, dict[str, Delivery]] = defaultdict(dict)
    for row in rows:
        waiting = "sending" if row.leased else "waiting"
        found[row.aggregate_id][str(row.event_id)] = Delivery(
            event_id=str(row.event_id),
            type=row.event_type,
            state=waiting if row.status == "pending" else row.status,
            error=None if row.status == "delivered" else row.error_message,
        )
    return defaultdict(list, {number: list(each.values()) for number, each in found.items()})


async def trouble(session: AsyncSession, tables: Tables) -> str | None:
    """Why nothing is sent to Kafka at present, if so."""
    destination = tables.destination.c
    select = sa.select(destination.circuit_reason)
    closed = sa.and_(destination.name == "kafka", destination.circuit != "closed")
    return await session.scalar(select.where(closed))
