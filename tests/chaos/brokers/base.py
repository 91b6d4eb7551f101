"""What a schedule needs of a broker: a place for messages, the harm that can be done, and a plain reader."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import UUID

from tests.servers.restart import Restartable
from tests.waiting import wait_for

PATIENCE = 30.0  # Seconds for a broker to do what it is asked
DOWN = r"cannot connect|broke|[Cc]onnection|no broker|no answer"
SILENT = r"no answer|no acknowledgement|did not confirm|no broker|broke|cannot connect"


class Message(NamedTuple):
    event_id: UUID
    body: bytes


class Harm(NamedTuple):
    begin: Callable[[], None]
    end: Callable[[], None]
    says: str = ""
    """A pattern of what ``why`` says of an event that waits meanwhile; empty: nothing has to wait."""
    shut: bool = False  # Whether it takes nothing meanwhile, and later nothing that was sent meanwhile
    refuses: bool = False
    """Whether events fail for good meanwhile, with what it says, and an operator retries them afterwards."""


class Broker(Protocol):
    """A server of its own with one place (topic, queue, stream), whose messages outlive every harm.

    What was in a place that was deleted is read before it goes, once nothing can get there any more: so it is
    known exactly what the broker had acknowledged by then.
    """

    name: str
    timeout: float  # Seconds after which a relay gives up waiting for it
    copies: int  # How many messages one attempt may leave whose answer did not come

    @property
    def harms(self) -> Mapping[str, Harm]:
        """Return the faults that can be injected into it, by name."""

    @property
    def url(self) -> str:
        """Return the URL that relays send to."""

    def make(self) -> None:
        """Make a new, empty place and forget the old one."""

    def read(self) -> list[Message]:
        """Return all messages since the place was made, in order for each key, also of what was deleted."""


def nothing() -> None:
    """Do nothing: the fault ends by itself."""


class Local:
    copies = 1
    timeout = 1.0

    def __init__(self, running: Restartable) -> None:
        self._running = running
        self._silence = ExitStack()

    def _end(self) -> None:
        process = self._running._process
        os.kill(process, signal.SIGTERM)
        wait_for(lambda: _has_ended(process), "the server ended")
        self._running.stop()

    def _stop(self) -> None:
        self._silence.enter_context(self._running.silent())


def _has_ended(process: int) -> bool:
    with suppress(FileNotFoundError):
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    return True


BROKERS = ("redis", "nats", "rabbitmq", "kafka")
SINKS = (
    "relaybox.sinks.redis",
    *(f"relaybox.sinks.{broker}.sink" for broker in BROKERS if broker != "redis"),
)


@contextmanager
def running(name: str) -> Iterator[Broker]:
    """Run a server of this kind; raise ``tests.servers.base.Unavailable`` if it is not installed."""
    module = import_module(f"tests.chaos.brokers.{name}")
    with module.server.broker(**module.OPTIONS) as started:
        yield module.KIND(started)
