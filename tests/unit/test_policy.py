"""The failure policy: how long to wait, what is poison, what becomes of a row, how much to claim."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox import Reject, Retry, Unavailable
from relaybox.core.circuit import FIRST_PAUSE, LONGEST_PAUSE, REMEMBERED, THRESHOLD, Circuit
from relaybox.core.event import Delivery
from relaybox.core.outcome import (
    Delivered,
    Failed,
    Gone,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Throttled,
    Unreachable,
    delay,
)
from relaybox.core.settings import Backoff, Destination
from relaybox.relay.decide import FORGIVEN_STOPS, LONGEST_AFTER, Opening, Policy
from relaybox.relay.sizing import BATCHES_IN_FLIGHT, BYTES_IN_FLIGHT, LARGEST, Sizing
from relaybox.sinks.sink import Answer
from tests.unit import deliveries

RUNNER = Destination("runner", "memory:", backoff=Backoff(base="2s", cap="10s", jitter=0))


def middle() -> float:
    return 0.5


def make(attempts: int = 1, event_id: UUID | None = None, key: str | None = None) -> Delivery:
    return deliveries.make(attempts=attempts, event_id=event_id or uuid4(), ordering_key=key)


def policy(destination: Destination = RUNNER) -> Policy:
    return Policy(destination, Circuit(), middle)


def test_the_wait_doubles_up_to_the_cap() -> None:
    backoff = Backoff(base="1s", cap="1m", jitter=0)
    assert [delay(backoff, attempts, middle) for attempts in (1, 2, 3, 6, 7, 10_000)] == [1, 2, 4, 32, 60, 60]


def test_jitter_spreads_the_wait() -> None:
    chance = random.Random(1)
    some = [delay(Backoff(base="10s", jitter=0.1), 1, chance.random) for _ in range(1000)]
    assert 9 <= min(some) < 9.2
    assert 10.8 < max(some) <= 11
    full = [delay(Backoff(base="10s", jitter="full"), 1, chance.random) for _ in range(1000)]
    assert min(full) < 0.5
    assert 9.5 < max(full) <= 10


@pytest.mark.parametrize(
    ("answer", "attempts", "outcome"),
    [
        (Delivered(), 1, Delivered()),
        (Released(), 1, Released()),
        (Reject("422"), 1, Failed("422")),
        (Reject(), 1, Failed("rejected")),
        (Retry("500"), 1, Retried(2, "500")),
        (Retry("500"), 3, Retried(8, "500")),
        (Retry("500"), 4, Retried(10, "500")),
        (Retry("500", after=7), 1, Retried(7, "500")),
        (Retry("500", after=timedelta(days=9)), 1, Retried(LONGEST_AFTER, "500")),
        (Retry("500", after=-1), 1, Retried(0, "500")),
        (Retry(), 1, Retried(2, "failed")),
        (Retry("500"), 5, Failed("500")),
        (Retry("500", after=7), 5, Failed("500")),
        (Interrupted("stopped", after=7), 5, Retried(7, "stopped", counts=False, cut_off=True)),
        (Unavailable("503"), 5, Retried(2, "503", counts=False)),
        (Unavailable("429", after=30), 1, Retried(30, "429", counts=False)),
        (Unreachable("refused"), 5, Retried(FIRST_PAUSE, "refused", counts=False)),
        (Gone("410"), 5, Retried(2, "410", counts=False)),
    ],
)
def test_an_answer_decides_what_becomes_of_the_row(answer: Answer, attempts: int, outcome: Outcome) -> None:
    assert policy().decide(answer, make(attempts))[0] == outcome


@pytest.mark.parametrize(
    ("stops", "attempts", "outcome"),
    [
        (FORGIVEN_STOPS - 1, 5, Retried(7, "stopped", counts=False, cut_off=True)),
        (FORGIVEN_STOPS, 4, Retried(7, "stopped", cut_off=True)),
        (FORGIVEN_STOPS, 5, Failed("stopped")),
    ],
)
def test_stops_that_interrupt_a_function_again_and_again_count_as_attempts(
    stops: int, attempts: int, outcome: Outcome
) -> None:
    delivery = deliveries.make(attempts=attempts, crashes=stops)
    assert policy().decide(Interrupted("stopped", after=7), delivery)[0] == outcome


NONSENSE: list[Any] = ["soon", "", b"3", float("nan"), object(), [], 1j, 10**400, "1e999"]


@pytest.mark.parametrize("after", NONSENSE, ids=lambda value: type(value).__name__)
def test_an_invalid_time_is_answered_with_a_bounded_wait(after: Any) -> None:
    outcome, _ = policy().decide(Retry("busy", after=after), make())
    assert isinstance(outcome, Retried)
    assert 0 <= outcome.after <= LONGEST_AFTER


@pytest.mark.parametrize(
    "reason", [123, None, b"bytes", ["list"], object()], ids=lambda value: type(value).__name__
)
def test_a_reason_that_is_not_text_is_replaced(reason: Any) -> None:
    retried, _ = policy().decide(Retry(reason), make())
    rejected, _ = policy().decide(Reject(reason), make())
    assert (retried, rejected) == (Retried(2, "failed"), Failed("rejected"))


def test_an_outage_costs_no_attempts_however_long_it_is_and_is_waited_for_longer_and_longer() -> None:
    one, delivery = policy(), make(attempts=5)
    outcomes = [one.decide(Unavailable("503"), delivery)[0] for _ in range(20)]
    assert outcomes[:4] == [Retried(wait, "503", counts=False) for wait in (2, 4, 8, 10)]
    assert set(outcomes[4:]) == {Retried(10, "503", counts=False)}
    slow = policy(Destination("runner", "memory:", backoff=Backoff(base="1h", cap="9h", jitter=0)))
    assert slow.decide(Unavailable("503"), make())[0] == Retried(LONGEST_PAUSE, "503", counts=False)


def test_without_retention_what_was_delivered_goes_at_once_but_for_what_has_an_idempotency_key() -> None:
    one, event_id = policy(Destination("runner", "memory:", retention=0)), uuid4()
    plain = deliveries.make(event_id=event_id, idempotency_key=str(event_id))
    keyed = deliveries.make(event_id=event_id, idempotency_key="order 7")
    assert one.decide(Delivered(), plain)[0] == Delivered(keep=False)
    assert one.decide(Delivered(), keyed)[0] == Delivered(keep=True), "pruning notes it at the key"
    assert one.shadowed(plain) == Delivered(keep=False, shadow=True)
    assert one.shadowed(keyed) == Delivered(keep=True, shadow=True)
    assert policy().shadowed(plain) == Delivered(keep=True, shadow=True)


def test_an_event_that_fails_while_others_arrive_is_poison() -> None:
    one, poison = policy(), uuid4()
    first, _ = one.decide(Unavailable("timed out"), make(1, poison))
    assert first == Retried(2, "timed out", counts=False)
    one.decide(Delivered(), make())
    assert one.decide(Unavailable("timed out"), make(1, poison)) == (Retried(2, "timed out"), None)
    one.decide(Delivered(), make())
    assert one.decide(Unavailable("timed out"), make(5, poison)) == (Failed("timed out"), None)


def test_poison_does_not_open_the_circuit_however_many_there_are() -> None:
    one, poison = policy(), [uuid4() for _ in range(THRESHOLD)]
    openings = []
    for _ in range(4):
        for event_id in poison:
            openings.append(one.decide(Unavailable("timed out"), make(1, event_id))[1])
            one.decide(Delivered(), make())
    assert set(openings) == {None}


@pytest.mark.parametrize("answer", [Unreachable("refused"), Throttled("429"), Gone("410")])
def test_where_nobody_listens_or_everybody_is_turned_away_no_event_is_poison(answer: Unavailable) -> None:
    one, event_id = policy(), uuid4()
    for _ in range(5):
        one.decide(Delivered(), make())
        outcome, _ = one.decide(answer, make(5, event_id))
        assert outcome == Retried(outcome.after, answer.reason, counts=False)  # type: ignore[union-attr]


def test_trouble_of_several_events_opens_the_circuit_unless_one_arrives_between() -> None:
    one = policy()
    openings = [one.decide(Unavailable("503"), make())[1] for _ in range(THRESHOLD)]
    assert openings == [None] * (THRESHOLD - 1) + [Opening("503")]
    well = policy()
    for _ in range(3):
        for _ in range(THRESHOLD - 1):
            assert well.decide(Unavailable("503"), make())[1] is None
        well.decide(Delivered(), make())


@pytest.mark.parametrize("same", ["event", "key"])
def test_trouble_of_one_event_or_key_does_not_open_the_circuit(same: str) -> None:
    one, event_id = policy(), uuid4()
    trouble = [make(1, event_id) if same == "event" else make(1, key="a") for _ in range(3 * THRESHOLD)]
    assert {one.decide(Unavailable("503"), delivery)[1] for delivery in trouble} == {None}


def test_a_refused_connection_opens_it_at_once_and_410_pauses_the_destination() -> None:
    assert policy().decide(Unreachable("refused"), make())[1] == Opening("refused")
    assert policy().decide(Gone("410"), make())[1] == Opening("410", gone=True)


def test_a_probe_that_fails_opens_it_again() -> None:
    one = policy()
    assert one.decide(Unavailable("503"), make(), probing=True)[1] == Opening("503")
    assert one.decide(Unavailable("429", after=9), make(), probing=True)[1] == Opening("429", 9)
    for answer in (Retry("500"), Reject("422"), Delivered()):
        one.decide(Unreachable("refused"), make())
        assert one.decide(answer, make(), probing=True)[1] is None, "it was answered"


def test_an_event_that_fails_as_a_probe_again_is_not_due_for_the_next_one() -> None:
    hasty = Destination("runner", "memory:", backoff={"base": "10ms", "cap": "50ms"})
    one, again = policy(hasty), uuid4()
    answers = [Unavailable("503"), Unavailable("503"), Unreachable("refused")]
    outcomes = [one.decide(answer, make(event_id=again), probing=True)[0] for answer in answers]
    first, second, refused = (one.after for one in outcomes if isinstance(one, Retried))
    assert first <= FIRST_PAUSE
    assert second == 2 * FIRST_PAUSE + hasty.poll_interval
    assert refused < second


def test_each_pause_is_twice_as_long_up_to_a_limit_and_short_again_after_a_success() -> None:
    circuit = Circuit()
    lengths = [circuit.pause(None) for _ in range(9)]
    assert lengths == [FIRST_PAUSE, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    circuit.acknowledge(uuid4())
    assert circuit.pause(None) == FIRST_PAUSE


def test_the_destination_may_ask_for_a_longer_pause_but_not_forever() -> None:
    busy = policy()
    for _ in range(THRESHOLD - 1):
        busy.decide(Unavailable("429", after=90), make())
    assert busy.decide(Unavailable("429", after=90), make())[1] == Opening("429", 90)
    assert policy().decide(Unreachable("down", after=10**9), make())[1] == Opening("down", LONGEST_AFTER)
    assert [Circuit().pause(asked) for asked in (0.1, 90)] == [FIRST_PAUSE, 90]


def test_what_a_circuit_remembers_of_events_is_bounded() -> None:
    circuit, first = Circuit(), uuid4()
    assert [circuit.fail(first).times for _ in range(2)] == [1, 2]
    for _ in range(REMEMBERED):
        circuit.fail(uuid4())
    assert circuit.fail(first).times == 1
    assert circuit.failed_last == first
    assert (circuit.times(first), circuit.times(uuid4())) == (1, 0)


def learn(sizing: Sizing, rows: int, *, size: int = 300, rate: float = 1e6, times: int = 1) -> int:
    """Claim each tenth of a second, while so many events a second are answered."""
    for _ in range(times):
        sizing.learn(rows, rows * size, int(rate / 10), next(TENTHS))
    return sizing.rows


TENTHS = (n / 10 for n in itertools.count(1))


def test_a_claim_grows_to_what_the_sink_takes_in_a_tenth_of_a_second_and_shrinks_again() -> None:
    sizing = Sizing(Destination("runner", "memory:", batch_size=100))
    learn(sizing, 100, rate=0)
    assert [learn(sizing, sizing.rows) for _ in range(5)] == [200, 400, 800, LARGEST, LARGEST]
    assert learn(sizing, 100, rate=4000, times=5) == 400
    assert learn(sizing, 100, rate=500) == 200
    assert learn(sizing, 3, rate=5, times=9) == 100
    assert sizing.in_flight == 100 * BATCHES_IN_FLIGHT


def test_large_payloads_make_claims_small_and_small_ones_large_again() -> None:
    sizing = Sizing(Destination("runner", "memory:"))
    rows = learn(sizing, 100, size=2**20, times=20)
    assert rows * 2**20 * BATCHES_IN_FLIGHT <= BYTES_IN_FLIGHT
    assert learn(sizing, 10, size=10**10) == 1
    assert learn(sizing, 1, size=100, times=60) >= 100


@pytest.mark.parametrize(("rate", "rows"), [(1000, 100), (200, 20), (5, 1), (0.1, 1)])
def test_a_rate_limit_bounds_a_claim_to_what_may_leave_soon(rate: float, rows: int) -> None:
    sizing = Sizing(Destination("runner", "memory:", rate_limit=rate, batch_size=100))
    assert sizing.rows == rows
    assert learn(sizing, rows, times=9) == rows
