"""The warehouse: ships what is paid. Kafka may tell it twice of a payment; it ships once."""

import os

from database import Sessions, Shipment
from sqlalchemy.ext.asyncio import AsyncSession

from relaybox import Event, Inbox
from relaybox.receive.consumers.kafka import KafkaConsumer

consumer = KafkaConsumer(
    os.environ["KAFKA"],
    "order-events",
    group="warehouse",
    inbox=Inbox(),
    transaction=Sessions,
    # By its name, one that was killed gets its partitions back at once, and not when its session has run out.
    settings={"group.instance.id": "warehouse-1"},
)


@consumer.on("order.paid")
async def ship(event: Event, session: AsyncSession) -> None:
    """Called once for each payment, in the transaction that also marks the event as processed."""
    session.add(Shipment(order_id=int(event.aggregate_id)))


if __name__ == "__main__":
    print("The warehouse waits for orders.", flush=True)
    consumer.serve()
