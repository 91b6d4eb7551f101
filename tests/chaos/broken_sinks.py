"""Sinks to brokers with one defect, whatever the broker, so that the harness is seen to notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from relaybox import Destination, parts
from relaybox.event import Delivery
from relaybox.outcome import Unavailable
from relaybox.sink import DELIVERED, REGARDLESS, Answer, Progress
from tests.chaos.workload import BROKER

DEFECTS = (
    "takes trouble for success",
    "sends to the broker twice",
    "sends to the broker backwards",
    "holds up the others",
    "does not say why",
)
HELD_UP = 6.0
"""Seconds for which a process does nothing else, once."""
ABOUT_ONE_IN = 20

_open_sink = parts.open_sink


class Broken:
    """A sink with a defect; everything else is the sink's own."""

    def __init__(self, sink: Any, defect: str) -> None:
        self._sink = sink
        self._defect = defect
        self._held_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Send them, more or less."""
        altered = Altered(progress, self._alter)
        if self._defect == "sends to the broker backwards":
            return list(reversed(await self._sink.send(deliveries[::-1], altered)))
        if self._defect == "sends to the broker twice":
            await self._sink.send([one for one in deliveries if not one.position % ABOUT_ONE_IN])
        return [self._alter(answer) for answer in await self._sink.send(deliveries, altered)]

    def _alter(self, answer: Answer) -> Answer:
        if not isinstance(answer, Unavailable):
            return answer
        match self._defect:
            case "takes trouble for success":
                return DELIVERED
            case "does not say why":
                return type(answer)("")
            case "holds up the others" if not self._held_up:
                self._held_up = True
                time.sleep(HELD_UP)
        return answer


class Altered:
    """The progress that is told of altered answers."""

    def __init__(self, progress: Progress, alter: Callable[[Answer], Answer]) -> None:
        self.begin = progress.begin
        self._report = progress.report
        self._alter = alter

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """It was answered so, or not quite."""
        self._report(delivery, self._alter(answer))


def spoil(defect: str) -> None:
    """Give every sink to a broker that this process opens the defect."""

    def open_broken(destination: Destination, handlers: Any) -> Any:
        sink = _open_sink(destination, handlers)
        return Broken(sink, defect) if destination.name == BROKER else sink

    parts.open_sink = open_broken
