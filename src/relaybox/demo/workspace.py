"""What the processes of the demo share: a database, ports and a directory with journals."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from relaybox.demo.journal import Fault, Placed, Reader, Receipt

HANDLER, WEBHOOK, FLAKY = DESTINATIONS = ("handler", "webhook", "flaky")
RECEIVERS = (WEBHOOK, FLAKY)

SECRET = "secret"


class Place(Struct, frozen=True):
    """Where everything is: ``directory`` has the journals, the logs and the webhooks' secret."""

    directory: str
    database: str
    ports: dict[str, int]
    seconds: float

    def path(self, name: str) -> Path:
        """A file of the demo."""
        return Path(self.directory) / name

    def url(self, receiver: str) -> str:
        """Where a receiver takes events."""
        return f"http://127.0.0.1:{self.ports[receiver]}/events"

    def secret(self) -> str:
        """What the relay signs with and the receivers verify with."""
        return self.path(SECRET).read_text()

    def received(self, destination: str) -> Path:
        """The journal of what a destination acknowledged."""
        return self.path(f"{destination}.received")

    def receipts(self, destination: str) -> Reader[Receipt]:
        """What a destination acknowledged."""
        return Reader(self.received(destination), Receipt)

    def refused(self, destination: str) -> Path:
        """The journal of what a receiver did not acknowledge."""
        return self.path(f"{destination}.refused")

    def faults(self, destination: str) -> Reader[Fault]:
        """What a receiver did not acknowledge."""
        return Reader(self.refused(destination), Fault)

    def placed(self) -> Reader[Placed]:
        """What the shop believes."""
        return Reader(self.path("shop.placed"), Placed)

    def ready_file(self, pid: int) -> Path:
        """The file that a process makes when it is at work."""
        return self.path(f"ready.{pid}")

    def ready(self) -> None:
        """Say that this process is at work."""
        self.ready_file(os.getpid()).touch()
