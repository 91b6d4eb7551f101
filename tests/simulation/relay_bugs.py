"""Bugs in the relay: in what it sends, in how it judges answers, and in what it does with leases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from relaybox import ordering, sink
from relaybox.circuit import Circuit, Trouble
from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Reject, Released, Retried, Retry, Unavailable
from relaybox.relay import lane as lane_module
from relaybox.relay.batch import Batch
from relaybox.relay.breaker import Breaker
from relaybox.relay.decide import Policy
from relaybox.relay.extend import Extender
from relaybox.relay.lane import Lane
from relaybox.relay.settle import Settler
from relaybox.relay.shared import Shared
from relaybox.sink import Answer, OneByOne, Progress
from relaybox.store import Claim, Settlement
from relaybox.stores.sql import SqlStore
from tests.simulation.bugs import Bug, faulty
from tests.simulation.plan import Plan
from tests.simulation.receivers import BulkSink

_send, _claim, _decide = Lane._send, Lane._claim, Policy.decide
_bulk, _store_claim, _probe_with = BulkSink.send, SqlStore.claim, Lane._probe_with
_give_up, _init, _open = Lane._give_up, Shared.__init__, Breaker.open


async def _nothing(*_: Any, **__: Any) -> None:
    """Leave it undone."""


async def _yes(*_: Any, **__: Any) -> bool:
    return True


# Sending.


async def _acknowledge_first(lane: Lane, batch: Batch, turn: bool) -> None:
    for delivery in batch.deliveries:
        lane.answer(batch, delivery, Delivered())
    await _send(lane, batch, turn)


async def _go_on_after_a_failure(
    self: OneByOne, deliveries: Sequence[Delivery], progress: Progress
) -> Sequence[Answer]:
    answers: list[Answer] = [Released()] * len(deliveries)
    async with self._places:
        for index, delivery in enumerate(deliveries):
            if progress.begin(delivery):
                answers[index] = Delivered()
                try:
                    await self.deliver(delivery)
                except BaseException as error:
                    answers[index] = sink._answer(error, asyncio.current_task())
                progress.report(delivery, answers[index])
    return answers


async def _mix_up_answers(
    self: BulkSink, deliveries: Sequence[Delivery], progress: Progress
) -> Sequence[Answer]:
    return list(reversed(await _bulk(self, deliveries, progress)))


def _begin_on_any_lease(lane: Lane, batch: Batch, delivery: Delivery) -> bool:
    batch.begun.add(delivery.position)
    return not lane._halted.is_set()


# Judging answers.


def _released_is_delivered(self: Policy, answer: Answer, delivery: Delivery, **options: Any) -> Any:
    return _decide(self, Delivered() if isinstance(answer, Released) else answer, delivery, **options)


def _silence_is_delivered(self: Policy, answer: Answer, delivery: Delivery, **options: Any) -> Any:
    silent = isinstance(answer, Unavailable) and answer.reason == "timed out"
    return _decide(self, Delivered() if silent else answer, delivery, **options)


def _rejects_are_retried(self: Policy, answer: Answer, delivery: Delivery, **options: Any) -> Any:
    if isinstance(answer, Reject):
        return Retried(0.5, answer.reason, counts=False), None
    return _decide(self, answer, delivery, **options)


def _retry_for_ever(self: Policy, answer: Retry | Unavailable, delivery: Delivery) -> Retried:
    return Retried(0.2, answer.reason, counts=False)


def _fail_early(self: Policy, answer: Retry | Unavailable, delivery: Delivery) -> Failed | Retried:
    if delivery.attempts >= delivery.max_attempts - 1:
        return Failed(answer.reason)
    return Retried(0.2, answer.reason)


def _outage_counts(self: Policy, answer: Unavailable, delivery: Delivery) -> Any:
    return self._retry(answer, delivery), None


def _nothing_is_poison(self: Circuit, event_id: Any) -> Trouble:
    return Trouble(1, poison=False)


# Leases and settles.


async def _forget_refused_outcomes(self: Settler, settlements: Sequence[Settlement]) -> None:
    destination = self._destination
    try:
        lost = await self._store.settle(
            settlements, on_failed=destination.on_failed or "skip", dead_letter=self._dead_letter
        )
    except StoreError as error:
        self._observer.trouble(destination.name, "settle", error)
    else:
        self._observer.settled(destination.name, settlements, lost)


async def _claim_shorter(self: SqlStore, want: Any) -> Claim:
    return await _store_claim(self, replace(want, lease=want.lease / 8))


async def _claim_suspects(lane: Lane, limit: int, **options: Any) -> tuple[Claim, float]:
    return await _claim(lane, limit, **options | {"suspects": True})


async def _claim_no_more_after_an_error(self: SqlStore, want: Any) -> Claim:
    try:
        return await _store_claim(self, want)
    except StoreError:
        await asyncio.get_running_loop().create_future()
        raise


def _init_without_quarantine(self: Shared, *args: Any, **options: Any) -> None:
    _init(self, *args, **options)
    self.quarantine = nullcontext()  # type: ignore[assignment]


# Stopping, resting, circuits.


async def _count_what_is_under_way(lane: Lane, patience: float) -> None:
    for batch in lane._in_flight:
        for delivery in batch.unanswered():
            lane.answer(batch, delivery, Delivered())
    await _give_up(lane, patience)


async def _wait_for_a_word(lane: Lane) -> None:
    await lane._shared.wake.wait(lane.name, 1e6)


async def _keep_what_is_not_sent(lane: Lane, claim: Claim, until: float, held: Any) -> Claim:
    with_release = lane._release
    lane._release = _yes  # type: ignore[method-assign]
    try:
        return await _probe_with(lane, claim, until, held)
    finally:
        lane._release = with_release  # type: ignore[method-assign]


async def _pause_for_ever(self: Breaker, opening: Any, **options: Any) -> None:
    await _open(self, replace(opening, gone=True), **options)


def _heals(plan: Plan) -> bool:
    return plan.heals


def _crowded(plan: Plan) -> bool:
    return plan.heals and plan.relays + bool(plan.churn) > plan.destinations[0].concurrency


def _refuses(plan: Plan) -> bool:
    """Only where it is clear that nothing else befell the relay."""
    return faulty("refused", "lost requests")(plan) and not faulty("lost answers", "slow network")(plan)


def _holds_up(plan: Plan) -> bool:
    return faulty("stall", "cut off", "slow network", "receiver slow")(plan)


def _dies(plan: Plan) -> bool:
    return faulty("crash", "crash point", "killer")(plan)


RELAY_BUGS = (
    Bug("acknowledges before it sends", [(Lane, "_send", _acknowledge_first)]),
    Bug("goes on with a key after a failure", [(OneByOne, "send", _go_on_after_a_failure)]),
    Bug(
        "sends the events of a key at the same time",
        [(sink, "runs", lambda deliveries: (list(range(len(deliveries))), {}))],
    ),
    Bug("matches answers with the wrong deliveries", [(BulkSink, "send", _mix_up_answers)]),
    Bug(
        "begins to send whatever is left of the lease", [(Lane, "may_begin", _begin_on_any_lease)], _holds_up
    ),
    Bug("takes what was not tried for delivered", [(Policy, "decide", _released_is_delivered)]),
    Bug("takes silence for an acknowledgement", [(Policy, "decide", _silence_is_delivered)]),
    Bug("retries what was rejected, for ever", [(Policy, "decide", _rejects_are_retried)], faulty("poison")),
    Bug("retries for ever", [(Policy, "_retry", _retry_for_ever)], faulty("poison")),
    Bug("fails an event one attempt early", [(Policy, "_retry", _fail_early)]),
    Bug("an outage uses up attempts", [(Policy, "_unavailable", _outage_counts)], faulty("outage")),
    Bug(
        "a poison event gets its attempt back for ever",
        [(Circuit, "fail", _nothing_is_poison)],
        faulty("poison"),
    ),
    Bug(
        "forgets outcomes that the database refused",
        [(Settler, "_settle", _forget_refused_outcomes)],
        _refuses,
    ),
    Bug("never extends a lease", [(Extender, "_extend", _yes)]),
    Bug("claims for a shorter time than it counts on", [(SqlStore, "claim", _claim_shorter)]),
    Bug("claims suspects beside the one that it examines", [(Lane, "_claim", _claim_suspects)], _dies),
    Bug(
        "claims suspects together with others",
        [(Lane, "_claim", _claim_suspects), (ordering, "_alone", lambda rows: rows)],
        _dies,
    ),
    Bug("never looks for suspects", [(Lane, "_examine", _nothing)], _dies),
    Bug("has several suspects in flight at once", [(Shared, "__init__", _init_without_quarantine)], _dies),
    Bug(
        "never claims again after a refused claim",
        [(SqlStore, "claim", _claim_no_more_after_an_error)],
        _heals,
    ),
    Bug("gives back what it has begun when it stops", [(Batch, "unbegun", Batch.unanswered)]),
    Bug("forgets what was answered when it stops", [(Lane, "_finish", _nothing)], faulty("churn")),
    Bug(
        "counts what is under way when it stops as delivered",
        [(Lane, "_give_up", _count_what_is_under_way)],
        faulty("churn"),
    ),
    Bug("keeps rows that it has no place to send", [(Lane, "_stand_back", _nothing)], _crowded),
    Bug("waits for a word and never polls", [(Lane, "_rest", _wait_for_a_word)], _heals),
    Bug("never probes", [(lane_module, "probe_is_due", lambda held: False)], faulty("outage")),
    Bug("leaves the circuit half-open after a probe", [(Breaker, "close", _nothing)], faulty("outage")),
    Bug(
        "keeps the rows that it does not probe with",
        [(Lane, "_probe_with", _keep_what_is_not_sent)],
        faulty("outage"),
    ),
    Bug("pauses a destination that is away for ever", [(Breaker, "open", _pause_for_ever)], faulty("outage")),
)
