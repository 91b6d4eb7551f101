"""Planted bugs: in the relay, in the steps of a store, or in the fake's statement of the same name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from relaybox.core import ordering
from relaybox.core.circuit import Circuit, Trouble
from relaybox.core.event import Delivery
from relaybox.core.ordering import Candidate
from relaybox.core.outcome import Delivered, Failed, Reject, Released, Retried, Retry, Unavailable
from relaybox.errors import StoreError
from relaybox.relay import lane as lane_module
from relaybox.relay.answer import Answers
from relaybox.relay.batch import Batch, Lease
from relaybox.relay.breaker import Breaker
from relaybox.relay.claim import Claims
from relaybox.relay.decide import Policy
from relaybox.relay.extend import Extender
from relaybox.relay.gate import Gate
from relaybox.relay.probe import Probe
from relaybox.relay.quarantine import Quarantine
from relaybox.relay.rest import Rest
from relaybox.relay.room import Room, Share
from relaybox.relay.send import Sender
from relaybox.relay.settle import Settler
from relaybox.relay.shutdown import Shutdown
from relaybox.relay.sizing import Sizing
from relaybox.relay.suspects import Suspects
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.sinks import sink
from relaybox.sinks.sink import Answer, OneByOne, Progress
from relaybox.stores.sql import outcomes as outcomes_module
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep.prune import SqlPrune
from relaybox.stores.store import ANY_SIZE, Claim, Settlement
from relaybox.stores.upkeep import Setting
from relaybox.testing.checker import Finding
from tests.simulation.application import Application
from tests.simulation.database import Database, Emitted, Row, Transaction
from tests.simulation.receivers import BulkSink
from tests.simulation.schedule import run_seed
from tests.simulation.statements import Item, Items, Place, Rows, Server, UpkeepServer
from tests.simulation.world import Node

Patch = tuple[Any, str, Any]  # The class or module, the name in it, and what is planted there


SEEDS = range(4000)


class Bug(NamedTuple):
    """A bug in plain words, and a seed under which it is caught.

    Where that seed does so no longer, ``python -m tests.simulation.run --bug NAME`` finds another.
    """

    name: str
    seed: int
    patches: Sequence[Patch]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in bug.patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def findings(bug: Bug, seed: int) -> list[Finding]:
    with planted(bug):
        return run_seed(seed).findings


def search(bug: Bug) -> int | None:
    """Return the first seed under which the bug is found, and nothing is found without it."""
    for seed in SEEDS:
        if findings(bug, seed) and not run_seed(seed).findings:
            return seed
    return None


_send, _claim, _decide = Sender._send, Claims.claim, Policy.decide
_bulk, _store_claim, _probe_with = BulkSink.send, SqlStore.claim, Probe._probe_with
_give_up, _open = Shutdown._give_up, Breaker.open
_agree = Agreement.__call__


async def _nothing(*_: Any, **__: Any) -> None:
    """Leave it undone."""


def _leave(*_: Any) -> None:
    """Leave it undone, at once."""


async def _yes(*_: Any, **__: Any) -> bool:
    return True


# Sending.


async def _acknowledge_first(self: Sender, batch: Batch) -> None:
    for delivery in batch.deliveries:
        self._answers.take(batch, delivery, Delivered())
    await _send(self, batch)


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


def _begin_on_any_lease(self: Gate, batch: Batch, delivery: Delivery) -> bool:
    batch.begun.add(delivery.position)
    return not self.halted.is_set()


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


def _retry_forever(self: Policy, answer: Retry | Unavailable, delivery: Delivery) -> Retried:
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
        lost = await self._shared.store.settle(
            settlements, on_failed=destination.on_failed or "skip", dead_letter=self._dead_letter
        )
    except StoreError as error:
        self._shared.observer.trouble(destination.name, "settle", error)
    else:
        self._shared.observer.settled(destination.name, settlements, lost)
    self._in_flight.drop([delivery for delivery, _ in settlements])


async def _claim_shorter(self: SqlStore, want: Any) -> Claim:
    return await _store_claim(self, replace(want, lease=want.lease / 8))


async def _claim_any_size(self: SqlStore, want: Any) -> Claim:
    return await _store_claim(self, replace(want, bytes=ANY_SIZE))


def _extend_whatever_is_locked(self: Lease, until: float, except_for: Any) -> None:
    self.until = until


async def _claim_suspects(self: Claims, limit: int, **options: Any) -> tuple[Claim, float]:
    return await _claim(self, limit, **options | {"suspects": True})


async def _claim_no_more_after_an_error(self: SqlStore, want: Any) -> Claim:
    try:
        return await _store_claim(self, want)
    except StoreError:
        await asyncio.get_running_loop().create_future()
        raise


async def _always_alone(self: Quarantine, batch: Batch) -> None:
    await self._hold(batch.deliveries[0], alone=len(batch.deliveries) == 1)


# Stopping, resting, circuits.


async def _count_what_is_under_way(self: Shutdown, patience: float) -> None:
    for batch in self._in_flight:
        for delivery in batch.unanswered():
            self._releases._settler.add_unsent(batch, delivery, Delivered())
    await _give_up(self, patience)


async def _wait_for_a_word(self: Rest) -> bool:
    return await self._shared.wake.wait(self._destination.name, 1e6)


async def _keep_what_is_not_sent(self: Probe, claim: Claim, until: float, held: Any) -> Claim:
    releases = self._source.releases
    with_release = releases.release
    releases.release = _yes  # type: ignore[method-assign, assignment]
    try:
        return await _probe_with(self, claim, until, held)
    finally:
        releases.release = with_release  # type: ignore[method-assign]


async def _pause_forever(self: Breaker, opening: Any, **options: Any) -> None:
    await _open(self, replace(opening, gone=True), **options)


_claim_steps, _effect = StoreSteps.claim, outcomes_module._effect
_is_free, _lease, _settle, _read = Server._is_free, Server.do_lease, Server.do_settle, Emitted.read
_extend, _copy, _execute = Server.do_extend, Server.do_copy_failed, Server.execute
_make_heads_due, _rollback = Server.do_make_heads_due, Database.rollback
_steps_settle = StoreSteps.settle

NO_SWEEP = (UpkeepServer, "do_upkeep__parked", lambda *_, **__: [])
"""Turn off the sweep, which would release what is left parked, and so hide why."""


def _fenced_by(holds: Callable[[Row, Item], bool], statement: Callable[..., Rows]) -> Callable[..., Rows]:
    """Return the statement with ``holds`` as its test for rows that are its own."""

    def execute(server: Any, transaction: Transaction, *items: Any, **params: Any) -> Rows:
        server.holds = holds
        try:
            return statement(server, transaction, *items, **params)
        finally:
            del server.holds

    return execute


def _is_pending(row: Row, item: Item) -> bool:
    return row.status == "pending"


def _is_there(row: Row, item: Item) -> bool:
    return True


# Claims.


def _free_above_the_cursor(server: Any, row: Row, now: float, suspects: bool) -> bool:
    last = server.__dict__.setdefault("last", Counter())
    new = row.attempts == 0 and row.token is None
    if new and row.emitted.position < last[row.emitted.destination]:
        return False
    return _is_free(row, now, suspects)


def _lease_and_move_the_cursor(
    server: Any, transaction: Transaction, ids: Sequence[str], *lease: Any, **named: Any
) -> Rows:
    last = server.__dict__.setdefault("last", Counter())
    for id_ in ids:
        emitted = server.database.row(transaction, id_).emitted
        last[emitted.destination] = max(last[emitted.destination], emitted.position)
    return _lease(server, transaction, ids, *lease, **named)


def _free_though_leased(row: Row, now: float, suspects: bool) -> bool:
    due = row.next_attempt_at is None or row.next_attempt_at <= now
    return row.status == "pending" and due and (suspects or row.crashes < 2)


def _free_if_never_leased(row: Row, now: float, suspects: bool) -> bool:
    return row.leased_until is None and _is_free(row, now, suspects)


def _claim_without_keys(self: StoreSteps, want: Any) -> Any:
    return _claim_steps(self, replace(want, ordered=False))


def _claim_swapped(self: StoreSteps, want: Any) -> Any:
    return _claim_steps(self, replace(want, on_failed="skip" if want.on_failed == "block" else "block"))


def _claim_without_dead_letter(self: StoreSteps, want: Any) -> Any:
    return _claim_steps(self, replace(want, dead_letter=None))


def _first_that_is_due(server: Any, transaction: Transaction, destination: str, key: str, block: bool) -> Any:
    now = server.database.now()
    for _, id_ in server.database.open[destination, key]:
        row = server.database.row(transaction, id_)
        waits = row is not None and row.next_attempt_at is not None and row.next_attempt_at > now
        if row is not None and server._is_open(row, block) and not waits:
            return id_
    return None


def _run_with_gaps(head: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
    later = [row for row in rows if row.position > head.position and row.free and not row.suspect]
    return [head, *later]


def _lease_counting(count: Callable[[Row], int]) -> Callable[..., Rows]:
    """Return a lease of rows that raises their attempts by ``count``."""

    def lease(server: Any, transaction: Transaction, ids: Sequence[str], *lease: Any, **named: Any) -> Rows:
        attempts = {}
        for id_ in ids:
            row = server.database.row(transaction, id_)
            attempts[id_] = row.attempts + count(row)
        rows = _lease(server, transaction, ids, *lease, **named)
        for id_, number in attempts.items():
            server.database.change(transaction, id_).attempts = number
        return rows

    return lease


def _by_the_relays_clock(server: Any, transaction: Transaction, query: Any) -> Rows:
    ahead = 0.0 if query[0].startswith("upkeep") else getattr(transaction.node, "offset", 0.0) % 6.0 - 3.0
    server.database.skew += ahead
    try:
        return _execute(server, transaction, query)
    finally:
        server.database.skew -= ahead


# Settles.


def _settle_and_count(server: Any, transaction: Transaction, items: Items, **settle: Any) -> Rows:
    rows = _settle(server, transaction, items, **settle)
    for [id_] in rows:
        server.database.change(transaction, id_).attempts += 1
    return rows


def _settle_and_leave_the_token(server: Any, transaction: Transaction, items: Items, **settle: Any) -> Rows:
    rows = _settle(server, transaction, items, **settle)
    for item in server._items(items):
        if [item.id] in rows and item.status == "pending":
            server.database.change(transaction, item.id).token = item.token
    return rows


def _make_free_heads_due(
    server: Any, transaction: Transaction, destination: str, keys: str, block: bool, **_: Any
) -> Rows:
    free = [
        key
        for key in msgspec.json.decode(keys)
        if (head := server._head(transaction, destination, key, block)) is None
        or server.database.lockable(transaction, head)
    ]
    return _make_heads_due(server, transaction, destination, msgspec.json.encode(free).decode(), block)


def _effect_without_return(outcome: Any) -> dict[str, Any]:
    effect = _effect(outcome)
    return {**effect, "given_back": 0} if isinstance(outcome, Released) else effect


def _settle_in_two_transactions(self: StoreSteps, *settle: Any) -> Any:
    steps = _steps_settle(self, *settle)
    queries: Any = next(steps)
    heads = [query for query in queries if query[0] in ("make_heads_due", "heads")]
    results = yield queries[: len(queries) - len(heads)]
    if heads:
        locks = [query for query in queries if query[0] in ("lock_settles", "lock_destination")]
        results += (yield [*locks, *heads])[len(locks) :]
    try:
        queries = steps.send(results)
        while True:
            queries = steps.send((yield queries))
    except StopIteration as end:
        return end.value


def _probe_only_what_is_open(server: Any, transaction: Transaction, destination: str, seconds: float) -> Rows:
    now = server.database.now()

    def over(place: Place) -> bool:
        return place.circuit == "open" and place.circuit_until is not None and place.circuit_until <= now

    change = {"circuit": "half_open", "circuit_until": now + seconds}
    return server._change(transaction, destination, over, change)  # type: ignore[no-any-return]


# The rest.


def _prune_whatever_is_old(
    server: Any,
    transaction: Transaction,
    destination: str,
    seconds: float,
    limit: int,
    term: int | None = None,
    **_: Any,
) -> Rows:
    database, before = server.database, server.database.now() + seconds
    old = [
        (row.updated_at, id_)
        for id_, row in database.rows.items()
        if row.emitted.destination == destination and row.updated_at < before
        if row.status != "failed" and database.lockable(transaction, id_)
    ][:limit]
    if term is None:
        return [[*server._removed(id_), at] for at, id_ in old]
    server.do_upkeep__remove(transaction, [id_ for _, id_ in old])
    return [[at] for at, _ in old]


class _Everything(dict[str, Setting]):
    """Settings of every destination there is."""

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, Setting(1.0, True, "block"))


async def _know_everything(self: Agreement) -> dict[str, Setting]:
    return _Everything(await _agree(self))


async def _know_only_its_own(self: Agreement) -> dict[str, Setting]:
    await _agree(self)
    return dict(self._mine)


def _emit_though_rolled_back(self: Database, transaction: Transaction) -> None:
    if isinstance(transaction.node, Application):
        self.commit(transaction)
    else:
        _rollback(self, transaction)


def _read_cut(emitted: Emitted, attempts: int, crashes: int) -> tuple[Any, ...]:
    payload = emitted.payload and emitted.payload[:7]
    return _read(emitted._replace(payload=payload), attempts, crashes)


BUGS = (
    Bug("acknowledges before it sends", 2, [(Sender, "_send", _acknowledge_first)]),
    Bug("goes on with a key after a failure", 239, [(OneByOne, "send", _go_on_after_a_failure)]),
    Bug(
        "sends the events of a key at the same time",
        2,
        [(sink, "runs", lambda deliveries: (list(range(len(deliveries))), {}))],
    ),
    Bug("matches answers with the wrong deliveries", 7, [(BulkSink, "send", _mix_up_answers)]),
    Bug("begins to send whatever is left of the lease", 143, [(Gate, "may_begin", _begin_on_any_lease)]),
    Bug("takes what was not tried for delivered", 7, [(Policy, "decide", _released_is_delivered)]),
    Bug("takes silence for an acknowledgement", 2, [(Policy, "decide", _silence_is_delivered)]),
    Bug("retries what was rejected, forever", 12, [(Policy, "decide", _rejects_are_retried)]),
    Bug("retries forever", 12, [(Policy, "_retry", _retry_forever)]),
    Bug("fails an event one attempt early", 15, [(Policy, "_retry", _fail_early)]),
    Bug("an outage uses up attempts", 2, [(Policy, "_unavailable", _outage_counts)]),
    Bug("a poison event gets its attempt back forever", 12, [(Circuit, "fail", _nothing_is_poison)]),
    Bug("forgets outcomes that the database refused", 1089, [(Settler, "_settle", _forget_refused_outcomes)]),
    Bug("forgets outcomes of rows that others have locked", 134, [(Settler, "run_locked", _nothing)]),
    Bug(
        "settles a key whose next row is locked, and leaves that parked",
        331,
        [(Server, "do_make_heads_due", _make_free_heads_due), NO_SWEEP],
    ),
    Bug("does not count the time that its machine was suspended", 175, [(Node, "now", Node.time)]),
    Bug("never extends a lease", 2, [(Extender, "_extend", _yes)]),
    Bug("claims for a shorter time than it counts on", 0, [(SqlStore, "claim", _claim_shorter)]),
    Bug("claims ignore bytes", 5, [(SqlStore, "claim", _claim_any_size)]),
    Bug("counts on leases that it could not extend", 1547, [(Lease, "extend", _extend_whatever_is_locked)]),
    Bug(
        "claims suspects together with others",
        6,
        [(Claims, "claim", _claim_suspects), (ordering, "_alike", lambda rows: rows)],
    ),
    Bug("never looks for suspects", 6, [(Suspects, "_examine", _nothing)]),
    Bug("counts the death of an innocent suspect", 727, [(Quarantine, "enter", _always_alone)]),
    Bug("takes the mark of a lone suspect from it too late", 848, [(Quarantine, "_end_solitude", _nothing)]),
    Bug(
        "slow keys take the room of the others",
        270,
        [(Sizing, "run", property(lambda sizing: sizing.rows)), (Room, "_make_room", _nothing)],
    ),
    Bug("leaves the rest of a key to the end of its batch", 327, [(Answers, "_leave_rest", _leave)]),
    Bug("never claims again after a refused claim", 57, [(SqlStore, "claim", _claim_no_more_after_an_error)]),
    Bug("gives back what it has begun when it stops", 336, [(Batch, "unbegun", Batch.unanswered)]),
    Bug("forgets what was answered when it stops", 189, [(Shutdown, "finish", _nothing)]),
    Bug(
        "counts what is under way when it stops as delivered",
        67,
        [(Shutdown, "_give_up", _count_what_is_under_way)],
    ),
    Bug("keeps rows that it has no place to send", 2286, [(Share, "_stand_back", _nothing)]),
    Bug("waits for a word and never polls", 106, [(Rest, "sleep", _wait_for_a_word)]),
    Bug("never probes", 6, [(lane_module, "is_due", lambda held: False)]),
    Bug("leaves the circuit half-open after a probe", 6, [(Breaker, "close", _nothing)]),
    Bug("keeps the rows that it does not probe with", 134, [(Probe, "_probe_with", _keep_what_is_not_sent)]),
    Bug("pauses a destination that is away forever", 6, [(Breaker, "open", _pause_forever)]),
    Bug(
        "looks only above the last position that it saw",
        2,
        [(Server, "_is_free", _free_above_the_cursor), (Server, "do_lease", _lease_and_move_the_cursor)],
    ),
    Bug("claims what is leased", 0, [(Server, "_is_free", staticmethod(_free_though_leased))]),
    Bug(
        "never takes over a lease that ran out",
        6,
        [(Server, "_is_free", staticmethod(_free_if_never_leased))],
    ),
    Bug("claims without a look at keys", 0, [(StoreSteps, "claim", _claim_without_keys)]),
    Bug("swaps block and skip", 7, [(StoreSteps, "claim", _claim_swapped)]),
    Bug(
        "looks for the head of a key among what is pending",
        7,
        [(Server, "_is_open", staticmethod(lambda row, block: row.status == "pending"))],
    ),
    Bug("takes the first that is due for the head of its key", 14, [(Server, "_head", _first_that_is_due)]),
    Bug("a run steps over what is not free", 89, [(ordering, "_run", _run_with_gaps)]),
    Bug("leases by the relay's own clock", 12, [(Server, "execute", _by_the_relays_clock)]),
    Bug(
        "counts attempts when it settles",
        6,
        [(Server, "do_lease", _lease_counting(lambda row: 0)), (Server, "do_settle", _settle_and_count)],
    ),
    Bug(
        "a killer's deaths are not counted",
        6,
        [(Server, "do_lease", _lease_counting(lambda row: int(row.token is None)))],
    ),
    Bug("the death of a batch is counted", 6, [(Server, "do_lease", _lease_counting(lambda row: 1))]),
    Bug("what died in all of its attempts is tried again", 6, [(Delivery, "exhausted", False)]),
    Bug("settles without the lease's token", 322, [(Server, "do_settle", _fenced_by(_is_pending, _settle))]),
    Bug("extends without the lease's token", 6, [(Server, "do_extend", _fenced_by(_is_pending, _extend))]),
    Bug("extends what is settled", 6, [(Server, "do_extend", _fenced_by(_is_there, _extend))]),
    Bug("leaves the token when it settles", 7, [(Server, "do_settle", _settle_and_leave_the_token)]),
    Bug("a release keeps the attempt", 14, [(outcomes_module, "_effect", _effect_without_return)]),
    Bug("parked rows are never made due", 2, [(StoreSteps, "_make_heads_due", lambda *_: []), NO_SWEEP]),
    Bug(
        "settles, and makes the next of a key due in another transaction",
        430,
        [(StoreSteps, "settle", _settle_in_two_transactions), NO_SWEEP],
    ),
    Bug(
        "copies a dead letter without holding the row",
        322,
        [(Server, "do_copy_failed", _fenced_by(_is_there, _copy))],
    ),
    Bug("writes no dead letter", 154, [(Server, "do_copy_failed", lambda *_, **__: [])]),
    Bug("writes no dead letter of a killer", 338, [(StoreSteps, "claim", _claim_without_dead_letter)]),
    Bug(
        "a circuit whose prober died is never probed again",
        259,
        [(Server, "do_probe", _probe_only_what_is_open)],
    ),
    Bug("prunes what is pending", 57, [(UpkeepServer, "do_upkeep__delivered", _prune_whatever_is_old)]),
    Bug("emits without waiting for the disk", 44, [(Application, "_waits_for_the_disk", lambda _: False)]),
    Bug("prunes what it does not know", 3425, [(Agreement, "__call__", _know_everything)]),
    Bug("prunes what another relay wants to keep", 449, [(Agreement, "__call__", _know_only_its_own)]),
    Bug("counts relays that lack the destination", 1600, [(Agreement, "may_have", lambda *_: True)]),
    Bug("prunes the key of an open event", 126, [(UpkeepServer, "_final_at", lambda *_: None)]),
    Bug(
        "forgets when the last row of an event was final",
        451,
        [(UpkeepServer, "keep_keys_of", lambda *_: None), (SqlPrune, "_keys_of", lambda *_: ())],
    ),
    Bug("delivers what was rolled back", 0, [(Database, "rollback", _emit_though_rolled_back)]),
    Bug("cuts payloads", 0, [(Emitted, "read", _read_cut)]),
)
