"""The contract on the sink that publishes to NATS, with a real server behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import nats
import pytest
from nats.aio.msg import Msg

from relaybox.config import Destination
from relaybox.sinks.nats import NatsSink
from relaybox.sinks.nats_connection import Broken, Connection
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script

ERRORS: dict[Trouble, bytes] = {
    "retry": b'{"error": {"code": 500, "err_code": 1, "description": "later"}}',
    "reject": b'{"error": {"code": 400, "err_code": 10097, "description": "never"}}',
    "unavailable": b'{"error": {"code": 503, "err_code": 2, "description": "down"}}',
}
_publish = Connection.publish


class TestNats(SinkContract):
    @pytest.fixture
    async def harness(self, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()

        async def publish(connection: Connection, subject: str, body: bytes, headers: dict[str, str]) -> Msg:
            event_id = UUID(headers["event-id"])
            trouble = script.arrive(event_id)
            if trouble == "crash":
                raise Broken("gone")
            if trouble is not None:
                return Msg(connection.client, data=ERRORS[trouble])
            if event_id in script._awaited:
                await script._arrived.wait()
            return await _publish(connection, subject, body, headers)

        monkeypatch.setattr(Connection, "publish", publish)
        async with await nats.connect(nats_url) as client:
            place = f"contract-{uuid4()}"
            await client.jetstream().add_stream(name=place, subjects=[place])
            script.sink = NatsSink(Destination("shop", f"{nats_url}/{place}", timeout="10s"))
            yield script
            script.release()
            await script.sink.close()
            await client.jetstream().delete_stream(place)
