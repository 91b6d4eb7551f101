"""The story: orders are placed, a receiver goes down and comes back, the relay is killed and restarted."""

from __future__ import annotations

import time
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from relaybox.demo.outbox import LEASE, TIMEOUT
from relaybox.demo.processes import Part
from relaybox.demo.supervisor import Stage, TimeUp
from relaybox.demo.verdict import Outage
from relaybox.demo.workspace import DESTINATIONS, RECEIVERS, WEBHOOK

RECEIVER_DOWN_AT, RECEIVER_DOWN_FOR = 0.1, 2.0
RELAY_KILLED_AT, RELAY_DEAD_FOR = 0.45, 1.0
"""When, as parts of the time in which orders are placed, and for how many seconds."""
CAUGHT_UP = 60
"""Deliveries that may be on their way when nothing is wrong."""


class Story:
    """What happens, one after the other. ``outages`` are those that concerned each destination."""

    def __init__(self, stage: Stage, seconds: float) -> None:
        self.outages: dict[str, list[Outage]] = {name: [] for name in DESTINATIONS}
        self._stage = stage
        self._seconds = seconds

    def play(self) -> bool:
        """Whether it came to its end in time."""
        stage = self._stage
        try:
            self._begin()
            self._interrupt_receiver()
            self._kill_relay()
            stage.doing = "the last orders"
            stage.wait(lambda: self._shop.ended)
            stage.say("the shop is closed; the relay delivers what is left")
            stage.doing = "delivering the rest"
            stage.wait(lambda: not stage.pending())
        except TimeUp:
            stage.say("time is up", "bad")
            stage.end()
            return False
        stage.doing = "comparing"
        stage.stop("relay")
        stage.watch()
        return True

    def _begin(self) -> None:
        stage = self._stage
        for part in [stage.start(name) for name in (*RECEIVERS, "relay")]:
            self._until_ready(part)
        for name in RECEIVERS:
            self._forge(name)
        self._shop = stage.start("shop")
        self._until_ready(self._shop)
        self._opened = time.monotonic()
        stage.doing = "orders are placed"
        stage.say(f"the shop is open for {self._seconds:g} s")

    def _forge(self, name: str) -> None:
        """A receiver that took this would show a phantom at the end."""
        body = b'{"type": "order.placed", "aggregate_id": "1", "data": {"ref": "forged", "number": 1}}'
        headers = {
            "webhook-id": "forged",
            "webhook-timestamp": str(int(time.time())),
            "webhook-signature": "v1,Zm9yZ2Vk",
        }
        status = HTTPStatus.OK
        try:
            urlopen(Request(self._stage.url(name), body, headers), timeout=TIMEOUT).close()
        except HTTPError as error:
            status = HTTPStatus(error.code)
        self._stage.say(f"{name}: a forged event was answered {status.value} {status.phrase}")

    def _interrupt_receiver(self) -> None:
        stage = self._stage
        stage.wait_until(self._opened + RECEIVER_DOWN_AT * self._seconds)
        begin = time.monotonic()
        pid = stage.kill(WEBHOOK)
        stage.doing = "the webhook receiver is down"
        stage.say(f"the webhook receiver (process {pid}) is killed: connections are refused", "bad")
        stage.wait_until(begin + RECEIVER_DOWN_FOR)
        before = stage.arrived(WEBHOOK)
        self._until_ready(stage.start(WEBHOOK))
        stage.say(f"the webhook receiver is back after {time.monotonic() - begin:.1f} s", "good")
        stage.wait(lambda: stage.arrived(WEBHOOK) > before and stage.circuits.get(WEBHOOK) == "closed")
        self.outages[WEBHOOK].append(Outage(begin, time.monotonic()))
        stage.say("a probe got through: the circuit is closed", "good")
        stage.doing = "the webhook receiver catches up"
        stage.wait(lambda: stage.pending() < CAUGHT_UP)
        stage.say("the webhook receiver has caught up", "good")
        stage.doing = "orders are placed"

    def _kill_relay(self) -> None:
        stage = self._stage
        stage.wait_until(self._opened + RELAY_KILLED_AT * self._seconds)
        begin = time.monotonic()
        pid = stage.kill("relay")
        held = stage.held_by(pid)
        stage.doing = "the relay is dead"
        stage.say(f"the relay (process {pid}) gets SIGKILL while it holds {held} deliveries", "bad")
        stage.wait_until(begin + RELAY_DEAD_FOR)
        relay = stage.start("relay")
        self._until_ready(relay)
        stage.say(f"another relay (process {relay.pid}) takes over", "good")
        stage.doing = "the dead relay's leases run out"
        stage.wait_until(begin + LEASE)
        stage.wait(lambda: not stage.held_by(pid) and not stage.suspects())
        for outages in self.outages.values():
            outages.append(Outage(begin, time.monotonic()))
        stage.say("what the dead relay held is delivered", "good")

    def _until_ready(self, part: Part) -> None:
        self._stage.wait(lambda: part.ready)
