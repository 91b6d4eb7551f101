"""A server of NATS that is down, breaks connections or says nothing, and what becomes of events."""

from __future__ import annotations

from collections.abc import Iterator

import nats
import pytest

from relaybox.outcome import Delivered, Unavailable
from relaybox.sinks import nats_connection
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.jetstream import read, stream
from tests.integration.outages import Entry, OutageContract, Place, checked, untroubled
from tests.integration.sinking import deliver, send, sink_to
from tests.servers import nats as server


class NatsPlace(Place):
    """A stream that drops what reaches it twice."""

    scheme = "nats"
    silence = "no acknowledgement"

    @property
    def url(self) -> str:
        return server.url_of(self.server)

    async def declare(self) -> None:
        async with await nats.connect(self.url) as client:
            await client.jetstream().add_stream(name="orders", subjects=["Order.>"])

    async def entries(self) -> list[Entry]:
        async with await nats.connect(self.url) as client:
            messages = await read(client, "orders", "Order.>")
        for message in messages:
            assert message.subject == "Order.order.paid"
            assert message.headers["Nats-Msg-Id"] == message.headers["event-id"]
        return [Entry(message.headers, message.data) for message in messages]


@pytest.fixture
def place() -> Iterator[NatsPlace]:
    """A server that a test may stop."""
    with available("NATS", server.broker()) as started:
        yield NatsPlace(started)


class TestNatsOutages(OutageContract):
    @pytest.mark.parametrize("size", [1, 500_000])
    async def test_a_connection_on_which_nothing_is_heard_is_given_up_for_a_new_one(
        self, place: NatsPlace, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.1)
        await place.declare()
        async with sink_to(place.url, timeout="2s") as sink:
            await deliver(sink)
            first = sink._connection
            with place.server.silent():
                answers = await sink.send([make_delivery(data=b"x" * size) for _ in range(20)])
                assert {type(answer) for answer in answers} == {Unavailable}
            await deliver(sink)
            assert sink._connection is not first

    async def test_of_several_hosts_one_that_is_there_is_enough(self, place: NatsPlace) -> None:
        await place.declare()
        for _ in range(4):
            [answer] = await send(f"nats://127.0.0.1:1,127.0.0.1:{place.server.port}", make_delivery())
            assert answer == Delivered()

    async def test_the_check_says_which_stream_is_missing(self, place: NatsPlace) -> None:
        async with stream(place.url) as made:
            assert await checked(place.url, options={"stream": made.name}) == "fine"
            assert await checked(f"{place.url}/{made.name}.paid") == "fine"
            assert "no stream 'orders'" in await checked(place.url, options={"stream": "orders"})
            assert "no stream for 'orders'" in await checked(f"{place.url}/orders")

    async def test_a_missing_stream_is_reported_and_holds_up_no_other_destination(
        self, place: NatsPlace, database: str
    ) -> None:
        trouble = f"no stream of 127.0.0.1:{place.server.port} takes the subject 'Order.order.paid'"
        await untroubled(database, place.url, trouble, place.declare)
