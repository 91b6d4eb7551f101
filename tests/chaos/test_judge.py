"""The judges find what they are there to find, and the same seed draws the same, all without a process."""

from __future__ import annotations

import select
import socket
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from tests.chaos import faults, receiver
from tests.chaos.broker_schedule import Flight, Wait, Window, draw, excuses, waits
from tests.chaos.checker import Answer, Change, Disorder, Row, prove
from tests.chaos.faults import CLOCK, DATABASE, NETWORK, RECEIVER, RELAY, Means
from tests.chaos.workload import BROKER, LOOSE, ORDERED
from tests.waiting import await_for

START = datetime(2026, 1, 1)

pytestmark = pytest.mark.fast


class Story:
    """A history in the making: two rows, ``a`` before ``b``, of one key."""

    def __init__(self) -> None:
        self._rows = {"a": Row("a", "key", 1, 0, "pending"), "b": Row("b", "key", 2, 1, "pending")}
        blank = Change._make([0, 0, "", None, "pending", "pending", *[None] * 7, 0, 0, 0, 0])
        self._now = {id_: blank._replace(id=id_) for id_ in self._rows}
        self._changes: list[Change] = []
        self._answers: list[Answer] = []

    def claim(self, ids: str, by: str, at: float, **other: Any) -> Story:
        """``by`` leases rows for ten seconds."""
        for id_ in ids:
            now = self._now[id_]
            died = now.token is not None
            self._change(
                id_,
                connection=ord(by),
                owner=by,
                token=f"{by}{at}",
                claimed_at=START + timedelta(seconds=at),
                leased_until=START + timedelta(seconds=at + 10),
                **{"attempts": now.attempts + (not died), "crashes": now.crashes + died} | other,
            )
        return self

    def settle(self, id_: str, status: str = "delivered", *, by: str | None = None, **other: Any) -> Story:
        """End the lease of the row's holder, or of ``by``."""
        now = self._now[id_]
        owner, token = now.owner or "", now.token or ""
        connection = ord(by or owner)
        self._change(id_, connection=connection, status=status, token=None, leased_until=None, **other)
        return self.answered(owner, token, id_)

    def wait(self, id_: str) -> Story:
        """Let the row back off until the ninth second."""
        return self.settle(id_, "pending", next_attempt_at=START + timedelta(seconds=9))

    def answered(self, owner: str, token: str, id_: str, *, lost: bool = False) -> Story:
        self._answers.append(Answer(owner, token, [id_], [id_] if lost else []))
        return self

    def broken(self) -> set[str]:
        rows = [row._replace(status=self._now[row.id].status) for row in self._rows.values()]
        try:
            prove(rows, self._changes, self._answers, ["delivered", "pending"])
        except Disorder as disorder:
            return {violation.rule for violation in disorder.violations}
        return set()

    def _change(self, id_: str, **new: Any) -> None:
        now = self._now[id_]
        before = {f"old_{name}": getattr(now, name) for name in ("status", "token", "attempts", "crashes")}
        times = {f"old_{name}": getattr(now, name) for name in ("leased_until", "next_attempt_at")}
        change = now._replace(**before, **times, seq=len(self._changes) + 1, **new)
        self._changes.append(change)
        self._now[id_] = change


STORIES = [
    ("", "one claim takes both", Story().claim("ab", "A", 1).settle("a").settle("b")),
    ("", "in whatever order they are written", Story().claim("ba", "A", 1).settle("b").settle("a")),
    ("", "in turn", Story().claim("a", "A", 1).settle("a").claim("b", "B", 2).settle("b")),
    (
        "",
        "over",
        Story().claim("a", "A", 1).claim("a", "B", 12).answered("A", "A1", "a", lost=True).settle("a"),
    ),
    ("", "a zombie keeps what nobody took over", Story().claim("ab", "A", 1).claim("a", "B", 12).settle("b")),
    ("", "released", Story().claim("a", "A", 1).settle("a", "pending", attempts=0).claim("a", "B", 2)),
    ("claimed twice", "while leased", Story().claim("a", "A", 1).claim("a", "B", 2)),
    ("claimed early", "while backing off", Story().claim("a", "A", 1).wait("a").claim("a", "B", 5)),
    ("changed after its end", "claimed", Story().claim("a", "A", 1).settle("a").claim("a", "B", 20)),
    ("settled by another", "late", Story().claim("a", "A", 1).claim("a", "B", 12).settle("a", by="A")),
    ("miscounted", "two attempts", Story().claim("a", "A", 1, attempts=2)),
    ("untrue answer", "not lost", Story().claim("a", "A", 1).settle("a").answered("A", "A1", "a", lost=True)),
    ("out of turn", "the first is leased", Story().claim("a", "A", 1).claim("b", "B", 2)),
    ("out of turn", "the first is not claimed yet", Story().claim("b", "B", 1).claim("a", "A", 1)),
    ("out of turn", "the first was left behind", Story().claim("a", "A", 1).claim("b", "B", 12)),
    ("out of turn", "the first is backing off", Story().claim("a", "A", 1).wait("a").claim("b", "B", 5)),
    (
        "out of turn",
        "the first was released",
        Story().claim("a", "A", 1).settle("a", "pending", attempts=0).claim("b", "B", 5),
    ),
    ("delivered out of order", "past what was given back", Story().claim("ab", "A", 1).wait("a").settle("b")),
]


@pytest.mark.parametrize(("rule", "what", "story"), STORIES)
def test_each_broken_rule_is_named(rule: str, what: str, story: Story) -> None:
    assert story.broken() == ({rule} if rule else set())


def test_the_end_and_the_order_of_commits_are_judged() -> None:
    rows = [Row("a", "key", 1, 1, "delivered"), Row("b", "key", 2, 0, "pending")]
    with pytest.raises(Disorder, match=r"(?s)not delivered.*not in commit order"):
        prove(rows, [], [], ["delivered"])


def test_the_same_seed_does_the_same_harm() -> None:
    kinds = ("killed", "stopped", "full", "deleted")
    draws = [draw(seed, kinds) for seed in range(200)]
    assert draws == [draw(seed, kinds) for seed in range(200)]
    assert {blow.kind for one in draws for blow in one.blows} == set(kinds)
    assert sum(not one.blows for one in draws) in range(5, 40)
    assert any(one.general.faults for one in draws)
    assert any(one.general.dooms for one in draws)


EVENT = uuid4()
OUTSIDE = Flight(BROKER, EVENT, "host:7:a", 10.0, 11.0, delivered=True)
DURING = Flight(BROKER, EVENT, "host:7:a", 19.0, 21.0)
LOST = Flight(BROKER, EVENT, "host:7:a", 30.0, 33.0, lost=True)
TROUBLE = [Window(20.0, 25.0)]


@pytest.mark.parametrize(
    ("flights", "killed", "copies", "excused"),
    [
        ([OUTSIDE], (), 2, 0),
        ([OUTSIDE._replace(delivered=False), OUTSIDE], (), 1, 0),
        ([DURING, OUTSIDE], (), 1, 1),
        ([DURING, OUTSIDE], (), 2, 2),
        ([DURING], (), 2, 1),
        ([LOST, OUTSIDE], (), 1, 0),
        ([LOST, OUTSIDE], (7,), 1, 1),
        ([LOST, OUTSIDE], (70,), 1, 0),
    ],
)
def test_a_duplicate_needs_an_attempt_that_something_befell(
    flights: list[Flight], killed: tuple[int, ...], copies: int, excused: int
) -> None:
    found = excuses(flights, TROUBLE, killed, BROKER, copies)
    assert found.get((BROKER, EVENT), 0) == excused


def test_an_attempt_that_found_nobody_excuses_nothing() -> None:
    shut = [Window(20.0, 25.0, (21.0, 24.0))]
    in_vain = DURING._replace(begun=21.5, ended=23.5)
    assert excuses([in_vain, OUTSIDE], shut, (), BROKER, 2) == {}
    assert excuses([in_vain._replace(ended=24.5), OUTSIDE], shut, (), BROKER, 2) == {(BROKER, EVENT): 2}
    assert excuses([DURING, OUTSIDE], shut, (), BROKER, 2) == {(BROKER, EVENT): 2}


def test_the_brokers_trouble_excuses_nothing_that_went_elsewhere() -> None:
    elsewhere = [flight._replace(destination=ORDERED) for flight in (DURING, OUTSIDE)]
    assert excuses(elsewhere, TROUBLE, (), BROKER, 1) == {}


def test_a_wait_counts_for_as_long_as_nothing_else_arrived() -> None:
    created = {("a", ORDERED): 0.0, ("b", ORDERED): 1.0, ("c", ORDERED): 1.0, ("d", LOOSE): 1.0}
    arrivals = [("a", ORDERED, 0.5), ("b", ORDERED, 5.0), ("b", ORDERED, 6.0), ("c", ORDERED, 6.5)]
    assert list(waits(created, [*arrivals, ("d", LOOSE, 7.0)])) == [
        Wait(("a", ORDERED), 0.5, 0.5),
        Wait(("b", ORDERED), 4.0, 4.0),
        Wait(("c", ORDERED), 5.5, 0.5),
        Wait(("d", LOOSE), 6.0, 6.0),
    ]


def test_the_same_seed_draws_the_same_faults() -> None:
    means = Means(server=True, listens=True, clocks=True, pooler=True)
    draws = [faults.draw(seed, 2000, means) for seed in range(300)]
    assert draws == [faults.draw(seed, 2000, means) for seed in range(300)]
    kinds = {fault.kind for one in draws for fault in one.faults}
    own = {name for name in RELAY if name.endswith("crash point")}
    assert kinds >= {*RELAY, *DATABASE, *NETWORK, *RECEIVER, *CLOCK} - own
    assert {doom.point for one in draws for doom in one.dooms} >= {"claimed", "send", "answered", "settle"}
    assert sum(one.calm for one in draws) in range(5, 60)
    assert any(one.pooler for one in draws)


REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("peer", ["reads the answer", "does not read the answer", "closes before the answer"])
async def test_the_receiver_counts_the_answers_that_nobody_read(peer: str) -> None:
    subject = receiver.Receiver(receiver.Plan("", [ORDERED], 0))
    endpoint = subject.endpoints[ORDERED]
    await endpoint.listen()
    connection = socket.create_connection(("127.0.0.1", endpoint.port))
    connection.sendall(REQUEST)
    if peer != "closes before the answer":
        await await_for(lambda: select.select([connection], [], [], 0)[0], "the answer arrives")
    if peer == "reads the answer":
        connection.recv(100)
    connection.close()
    await await_for(lambda: subject.applied and not endpoint.connections, "the connection ends")
    endpoint.refuse()
    assert subject.unanswered == (0 if peer == "reads the answer" else 1)
