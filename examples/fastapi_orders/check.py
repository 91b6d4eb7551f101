"""Uses the shop as a customer would, while the consumer, the relay and Kafka are killed."""

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stage import Stage

from relaybox.demo.processes import Broken

SECONDS = 90.0
ORDERS = 50
Line = dict[str, Any]


class Customer:
    """Calls the API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def buy(self, item: str) -> None:
        """Place an order and pay it."""
        number = self.post("orders", {"item": item, "quantity": 1})["id"]
        self.post(f"orders/{number}/pay")

    def lines(self) -> list[Line]:
        """The orders with their events and shipments, newest first."""
        with urlopen(f"{self._url}orders") as answer:
            return json.load(answer)

    def post(self, path: str, body: Any = None) -> Any:
        """Return what the shop answers."""
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{self._url}{path}", json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)

    def refused(self, path: str, body: Any = None) -> int:
        """The status that the shop refuses it with."""
        try:
            self.post(path, body)
        except HTTPError as error:
            with error:
                return error.code
        raise Broken(f"the shop took {body!r} at {path}")


class Check:
    """The steps, in their order."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._customer = Customer(stage.url)

    def one_order(self) -> None:
        """From the shop to the warehouse."""
        self._customer.buy("tea")
        self._until("an order is placed and paid: Kafka has both events, and it is shipped", shipped)

    def bad_input(self) -> None:
        """Check what the shop does not take."""
        refused = self._customer.refused
        statuses = [
            refused("orders", {"item": "tea", "quantity": 0}),
            refused("orders", {"item": "", "quantity": 1}),
            refused("orders/2000000000/pay"),
        ]
        self._until(
            "what is not an order is refused, and leaves nothing behind",
            lambda lines: statuses == [422, 422, 404] and len(lines) == 1,
        )

    def two_kills(self) -> None:
        """The shop goes on while those behind it die."""
        for number in range(2, ORDERS + 1):
            self._customer.buy(f"tea no. {number}")
            if number == ORDERS // 3:
                self._stage.kill("consumer")
            if number == ORDERS // 2:
                self._stage.kill("relay")
        self._until(
            f"of {ORDERS} orders some wait: consumer and relay were killed in the middle",
            lambda lines: len(lines) == ORDERS and not shipped(lines),
        )
        self._stage.start("consumer", "relay")
        self._until("both are back, and every order is shipped", shipped)

    def outage(self) -> None:
        """Kafka is killed, and started with what it had."""
        if not self._stage.kafka.is_new:
            return
        self._stage.kill("kafka")
        self._customer.buy("coffee")
        self._until("Kafka is killed: an order waits, and the shop says why", waits)
        self._stage.start("kafka")
        self._until("Kafka is back, and it is shipped", shipped)

    def replay(self) -> None:
        """Check that an event can be sent once more."""
        before = self._stage.kafka.messages()
        paid = self._customer.lines()[-1]["events"][-1]
        self._stage.relaybox("replay", paid["event_id"])
        self._until(
            "an event is replayed, and Kafka has it twice",
            lambda lines: self._stage.kafka.messages() > before and shipped(lines),
        )

    def count(self) -> None:
        """One shipment for each order, though Kafka has more messages than there are events."""
        messages = self._stage.kafka.messages()
        self._until(
            "the warehouse has read everything, and ships nothing twice",
            lambda lines: self._stage.kafka.read_by("warehouse") == messages and shipped(lines),
        )
        lines = self._customer.lines()
        events = sum(len(line["events"]) for line in lines)
        shipments = sum(line["shipments"] for line in lines)
        print(f"{len(lines)} orders, {events} events, {messages} messages in Kafka, {shipments} shipments.")
        if messages <= events:
            raise Broken("no event came twice, though one was replayed")

    def _until(self, text: str, condition: Callable[[list[Line]], bool]) -> None:
        began = time.monotonic()
        while not condition(lines := self._customer.lines()):
            self._stage.check()
            if time.monotonic() > began + SECONDS:
                raise Broken(f"not after {SECONDS:g} s: {text}; there is {lines}")
            time.sleep(0.1)
        print(f"ok {time.monotonic() - began:5.1f} s  {text}", flush=True)


def shipped(lines: list[Line]) -> bool:
    """True if every order is, once, and Kafka has its events; raise ``Broken`` if one is twice."""
    if twice := [line for line in lines if line["shipments"] > 1]:
        raise Broken(f"shipped more than once: {twice}")
    states = {event["state"] for line in lines for event in line["events"]}
    return states == {"delivered"} and all(line["shipments"] for line in lines)


def waits(lines: list[Line]) -> bool:
    """True if the latest order waits, with a reason."""
    placed, paid = lines[0]["events"]
    return placed["state"] == paid["state"] == "waiting" and bool(placed["error"])


def check(stage: Stage) -> None:
    """Say each step that came to its end; raises ``Broken`` at the first that does not."""
    steps = Check(stage)
    for step in (
        steps.one_order,
        steps.bad_input,
        steps.two_kills,
        steps.outage,
        steps.replay,
        steps.count,
    ):
        step()
