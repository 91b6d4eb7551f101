"""The contract on the sink of SQS, with moto's server behind an endpoint that does as the script says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import pytest
from aiohttp import ClientSession, web

from relaybox.config import Destination
from relaybox.sinks.sqs import open_sink
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script
from tests.integration.amazon import Amazon, sink_at

FAILED: dict[Trouble, dict[str, Any]] = {
    "retry": {"Code": "InternalError", "Message": "later", "SenderFault": False},
    "reject": {"Code": "InvalidMessageContents", "Message": "never", "SenderFault": True},
    "unavailable": {"Code": "KMS.AccessDeniedException", "Message": "down", "SenderFault": True},
}


class Front(Script):
    """Takes requests in the place of the service, and hands it what the script lets through."""

    def __init__(self, endpoint: str, session: ClientSession) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._session = session

    async def take(self, request: web.Request) -> web.Response:
        asked = await request.json()
        failed: list[dict[str, Any]] = []
        if request.headers["x-amz-target"] == "AmazonSQS.SendMessageBatch":
            asked["Entries"], failed = self._sift(asked["Entries"])
            if self._awaited:
                await self._arrived.wait()
            if not asked["Entries"]:
                return web.json_response({"Successful": [], "Failed": failed})
        said = await self._pass_on(request, asked)
        return web.json_response({**said, "Failed": [*said.get("Failed", ()), *failed]})

    def _sift(self, entries: list[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        kept, failed = [], []
        for entry in entries:
            event_id = UUID(entry["MessageAttributes"]["event-id"]["StringValue"])
            trouble = self.arrive(event_id)
            if trouble in FAILED:
                failed.append({"Id": entry["Id"], **FAILED[trouble]})
            elif trouble is None:
                kept.append(entry)
            # Else it breaks off: nothing is said of this one.
        return kept, failed

    async def _pass_on(self, request: web.Request, asked: Any) -> Any:
        names = ("x-amz-target", "authorization", "x-amz-date", "content-type")
        headers = {name: request.headers[name] for name in names}
        async with self._session.post(self._endpoint, data=json.dumps(asked), headers=headers) as response:
            response.raise_for_status()
            return json.loads(await response.read())


@pytest.fixture(scope="module")
def amazon(moto_url: str) -> Iterator[Amazon]:
    with Amazon(moto_url) as amazon:
        yield amazon


class TestSqs(SinkContract):
    @pytest.fixture(params=["", ".fifo"], ids=["standard", "fifo"])
    async def harness(self, request: pytest.FixtureRequest, amazon: Amazon) -> AsyncIterator[Script]:
        async with ClientSession() as session:
            front = Front(amazon.endpoint, session)
            app = web.Application()
            app.router.add_post("/", front.take)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            queue = amazon.queue(request.param)
            front.sink = open_sink(Destination("shop", sink_at(endpoint, queue.name), timeout="10s"))
            yield front
            front.release()
            await front.sink.close()
            await runner.cleanup()
