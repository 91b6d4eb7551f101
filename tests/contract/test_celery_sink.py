"""The contract on the sink that queues Celery tasks, with a real broker behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from kombu.exceptions import EncodeError, OperationalError

from relaybox.config import Destination
from relaybox.sinks.celery import CelerySink
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script

RAISED: dict[Trouble, BaseException] = {
    "retry": RuntimeError("later"),
    "reject": EncodeError("never"),
    "unavailable": OperationalError("down"),
    "crash": SystemExit(3),
}


class ScriptedCelery(Celery):
    """An application whose broker does as the script says."""

    script: Script

    def send_task(self, name: str, args: Any = None, *rest: Any, **options: Any) -> Any:
        event_id = UUID(args[0]["id"])
        trouble = self.script._troubles.get(event_id)
        # A connection that lay idle is given up for a new one, which is the same arrival.
        if trouble != "unavailable" or event_id not in self.script.received():
            self.script.arrive(event_id)
        if trouble is not None:
            raise RAISED[trouble]
        if event_id in self.script._awaited:
            self.script._arrived_in_threads.wait(10)
        return super().send_task(name, args, *rest, **options)


class TestCelery(SinkContract):
    @pytest.fixture
    async def harness(self, redis_url: str) -> AsyncIterator[Script]:
        script = Script()
        app = ScriptedCelery("shop", broker=redis_url)
        app.script = script
        script.sink = CelerySink(Destination("shop", "celery:shop.tasks.index", timeout="10s"))
        yield script
        script.release()
        await script.sink.close()
        app.close()
