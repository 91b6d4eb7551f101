"""The contract on the sink that produces to Kafka, with a real broker behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from relaybox.config import Destination
from relaybox.sinks import kafka_line
from relaybox.sinks.kafka import KafkaSink
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script

REPORTED: dict[Trouble, KafkaError] = {
    "retry": KafkaError(KafkaError.UNKNOWN),
    "unavailable": KafkaError(KafkaError.NOT_ENOUGH_REPLICAS),
    "crash": KafkaError(KafkaError._PURGE_INFLIGHT),
}


class ScriptedProducer(Producer):  # type: ignore[misc]
    """A producer whose broker does as the script says: what it takes, the real broker gets."""

    script: Script

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        self._reports: list[tuple[Any, KafkaError]] = []
        self._held: list[tuple[Any, dict[str, Any]]] = []

    def produce(self, *arguments: Any, **options: Any) -> None:
        event_id = UUID(options["headers"]["event-id"])
        trouble = self.script.arrive(event_id)
        if trouble == "reject":
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        if trouble is not None:
            self._reports.append((options["on_delivery"], REPORTED[trouble]))
        elif event_id in self.script._awaited and not self.script._arrived.is_set():
            self._held.append((arguments, options))
        else:
            super().produce(*arguments, **options)

    def poll(self, timeout: float = -1) -> int:
        if self.script._arrived.is_set():
            held, self._held = self._held, []
            for arguments, options in held:
                super().produce(*arguments, **options)
        reports, self._reports = self._reports, []
        for report, error in reports:
            report(error, None)
        return len(reports) + super().poll(timeout)


class TestKafka(SinkContract):
    @pytest.fixture
    async def harness(self, kafka_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()
        producer = type("Scripted", (ScriptedProducer,), {"script": script})
        monkeypatch.setattr(kafka_line, "Producer", producer)
        script.sink = KafkaSink(Destination("shop", f"{kafka_url}/contract-{uuid4()}", timeout="10s"))
        yield script
        script.release()
        await script.sink.close()
