"""The fake database answers as PostgreSQL, MariaDB and SQLite do.

RELAYBOX_FIDELITY sets how many histories are drawn for each database: few, and always the same, unless it is
set. RELAYBOX_SHRINK=1 looks for the shortest history that fails, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.errors import RowsLocked
from relaybox.stores.store import Claim, DeadLetter, OnFailed, Settlement, Want
from relaybox.stores.upkeep import Member, Slice
from tests.simulation.database import Database, Row, Transaction
from tests.simulation.fake_and_real import Disagreement, Label, New, Open, Pair, Pairing, Real, Side, tick
from tests.simulation.statements import Item, Rows, UpkeepServer

T = TypeVar("T")

names = st.sampled_from(("shop", "shop", "shop", "shop", "shop", "other", "dead"))
rarely = st.sampled_from(("other", "other", "shop", "dead"))  # What is held up gives little to compare
keys = st.sampled_from((None, "a", "a", "a", "b", "c"))
members = st.sampled_from(("relay-1", "relay-2"))
seconds = st.sampled_from((250.0, 650.0))
where = st.one_of(names.map(lambda name: [name]), st.just(["shop", "other"]))
# What has a key is not emitted for later.
news = st.one_of(
    st.builds(New, where, keys, st.just(0.0), st.integers(1, 3)),
    st.builds(New, where, st.none(), st.sampled_from((0.0, 150.0)), st.integers(1, 3)),
)
some = st.lists(news, min_size=1, max_size=4)
dead_letters = st.sampled_from((None, None, DeadLetter("dead", 2, True), DeadLetter("dead", 1)))
policies: st.SearchStrategy[OnFailed] = st.sampled_from(("block", "skip"))
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Delivered, st.booleans()),
    st.builds(Retried, st.sampled_from((0.0, 50.0, 350.0)), st.sampled_from(("503", "")), st.booleans()),
    st.just(Retried(50.0, "stopped", counts=False, cut_off=True)),
    st.builds(Failed, st.just("400"), st.booleans()),
    st.just(Released()),
)
several = st.lists(outcomes, min_size=1, max_size=4)
wants = st.builds(
    Want,
    destination=names,
    owner=members,
    limit=st.sampled_from((1, 2, 3, 4, 5, 7, 100)),
    lease=seconds,
    ordered=st.sampled_from((True, True, False)),
    on_failed=policies,
    dead_letter=dead_letters,
    probe=st.sampled_from((False, False, True)),
    suspects=st.sampled_from((True, True, False)),
    spread=st.sampled_from((None, 1, 2)),
    run=st.sampled_from((None, None, 1, 2)),
    light=st.booleans(),
)
past = st.sampled_from((1, 1, 1, 2))
picks = st.lists(st.integers(0, 40), min_size=1, max_size=6)


async def _walk(step: Callable[[Any], Awaitable[Slice[Any] | None]]) -> list[int | None]:
    changed: list[int | None] = []
    after = None
    while (part := await step(after)) is not None:
        changed.append(part.changed)
        after = part.after
        if after is None:
            return changed
    return [*changed, None]


async def _sweep(side: Side, term: int, name: str, block: bool) -> list[int | None]:
    return await _walk(lambda after: side.upkeep.sweep.make_due(name, block, after, 2))


async def _unpark(side: Side, term: int, name: str, block: bool) -> int | None:
    return await side.upkeep.sweep.unpark(name, 2)


async def _prune(side: Side, term: int, name: str, block: bool) -> list[int | None]:
    kept = await side.upkeep.prune.kept()
    assert all(row.destination in kept for row in side.see().rows if row.status == "delivered")
    return await _walk(lambda after: side.upkeep.prune.delivered(term, name, 50.0, after, 2))


CHORES = {"sweep": _sweep, "unpark": _unpark, "prune": _prune}
CHANGES: dict[str, Callable[[Side, str, float], Awaitable[bool]]] = {
    "open circuit": lambda side, name, length: side.store.open_circuit(name, length, "503"),
    "open again": lambda side, name, length: side.store.open_circuit(name, length, "504", probed=True),
    "probe": lambda side, name, length: side.store.probe(name, length),
    "close circuit": lambda side, name, length: side.store.close_circuit(name),
    "pause": lambda side, name, length: side.store.pause(name, "relay-1", "410"),
}


DOES = {
    "emits": {"emit"},
    "emits and locks a destination": {"emit", "place"},
    "locks rows": {"lock"},
    "discards rows": {"lock", "discard"},
}


beside = st.tuples(st.sampled_from(list(DOES)), some, picks)


def _chosen(rows: Sequence[T], indexes: Sequence[int]) -> list[T]:
    return [rows[i] for i in sorted({index % len(rows) for index in indexes})] if rows else []


class Machine(RuleBasedStateMachine):
    def __init__(self, pairing: Pairing) -> None:
        super().__init__()
        self.both = pairing
        self.both.clear()
        self.leased: list[Pair] = []
        self.batch: list[Pair] = []
        self.terms = [0]

    def teardown(self) -> None:
        for transaction in list(self.both.open):
            self.both.end(transaction, commit=False)

    def check(self, what: str, act: Callable[[Side], Awaitable[Any]], end: bool = True) -> Any:
        """Do it, compare what is answered and what is then in the tables."""
        fake, real = self.both.do(what, act, end)
        self.both.compare(what, fake, real)
        self.both.look()
        return fake

    # The application.

    @initialize(events=st.lists(news, min_size=3, max_size=10))
    def emit_some(self, events: list[New]) -> None:
        self.emit(events)

    @rule(events=some)
    def emit(self, events: list[New]) -> None:
        self._emit(transaction := self._begin(), events)
        self.both.end(transaction, commit=True)
        self.both.look()

    @rule(does=st.sampled_from(list(DOES)), events=some, name=names, which=picks)
    def begin(self, does: str, events: list[New], name: str, which: list[int]) -> None:
        """Something that others may have to wait for."""
        if not self.both.real.concurrent or len(self.both.open) == 2:
            return
        transaction = self._begin()
        if "emit" in DOES[does]:
            self._emit(transaction, events)
        if "place" in DOES[does]:
            got = [side.lock_place(tx, name) for side, tx in self._sides(transaction)]
            self.both.compare("lock a destination", *got)
            transaction.locked |= got[0]
        if "lock" in DOES[does]:
            self._lock(transaction, which, "discard" in DOES[does])
        self.both.look()

    def _begin(self) -> Open:
        tick()
        transaction = Open(self.both.fake.begin(), self.both.real.begin())
        self.both.open.append(transaction)
        return transaction

    def _sides(self, transaction: Open) -> list[tuple[Any, Any]]:
        return [(self.both.fake, transaction.fake), (self.both.real, transaction.real)]

    def _emit(self, transaction: Open, events: list[New]) -> None:
        self.both.compared["emit"] += 1
        for event in events:
            rows = self.both.new_event(event)
            transaction.written += [UUID(row[0]) for row in rows]
            for side, tx in self._sides(transaction):
                side.insert(tx, rows, event.delay)

    def _lock(self, transaction: Open, locks: list[int], discards: bool) -> None:
        """Rather rows that a relay has at the moment."""
        batch = {self.both.label("fake", pair.fake.id) for pair in self.batch}
        rows = [row for row in self.both.rows if row[0] in batch] or self.both.rows
        for label, *ids in _chosen(rows, locks):
            sides = [(side, tx, id_) for (side, tx), id_ in zip(self._sides(transaction), ids, strict=True)]
            got = [side.lock_row(tx, id_) for side, tx, id_ in sides]
            self.both.compare(f"lock {label}", *got)
            transaction.locked |= got[0]
            for side, tx, id_ in sides if got[0] and discards else ():
                side.discard(tx, id_)

    @precondition(lambda self: self.both.open)
    @rule(commit=st.booleans(), which=st.integers(0, 1))
    def end(self, commit: bool, which: int) -> None:
        self.both.compared["end"] += 1
        self.both.end(self.both.open[which % len(self.both.open)], commit=commit)
        self.both.look()

    @rule(length=st.sampled_from((100, 100, 300, 700)))
    def pass_time(self, length: int) -> None:
        for transaction in [transaction for transaction in self.both.open if transaction.locked]:
            self.both.end(transaction, commit=True)
        self.both.compared["pass time"] += 1
        self.both.fake.pass_time(length, ())
        self.both.real.pass_time(length, [(each.real, each.written) for each in self.both.open])
        self.both.look()

    # The relay.

    @rule(want=wants, only=st.none() | st.none() | picks, end=st.booleans())
    def claim(self, want: Want, only: list[int] | None, end: bool) -> None:
        chosen = None if only is None else _chosen(self.both.rows, only)
        sides: dict[Side, tuple[str, Want]] = {}
        for place, (side, name) in enumerate(((self.both.fake, "fake"), (self.both.real, "real")), 1):
            ids = None if chosen is None else tuple(row[place] for row in chosen)
            sides[side] = name, replace(want, only=ids)
        fake, real = self.both.do("claim", lambda side: side.store.claim(sides[side][1]), end)
        # Looked at first: what was committed while the claim waited has no name before that.
        self.both.look()
        self.both.compare("claim", self._answer("fake", fake), self._answer("real", real))
        parts = {"claimed": fake.deliveries, "parked": fake.parked, "held": fake.held, "failed": fake.failed}
        self.both.met.update(name for name, value in parts.items() if value)
        if fake.deliveries:
            self.batch = list(map(Pair, fake.deliveries, real.deliveries))
            self.leased += self.batch

    def _answer(self, side: str, claim: Claim) -> Any:
        seen = attrgetter("ordering_key", "attempts", "max_attempts", "crashes", "lease_owner")
        rows = [
            [(self.both.label(side, delivery.id), *seen(delivery)) for delivery in deliveries]
            for deliveries in (claim.deliveries, claim.failed)
        ]
        held = claim.held and (claim.held.why, claim.held.seconds, claim.held.reason)
        return (*rows, claim.parked, held)

    @rule(want=wants, said=several, end=st.booleans(), beside=st.none() | beside)
    def work(
        self, want: Want, said: list[Outcome], end: bool, beside: tuple[str, list[New], list[int]] | None
    ) -> None:
        """Do a round of a relay, and begin a transaction in the middle of it."""
        self.claim(want, None, end)
        if beside is not None:
            does, events, which = beside
            self.begin(does, events, want.destination, which)
        self.settle_batch(said, want.on_failed, want.dead_letter, end)

    @rule(want=wants, end=st.booleans(), events=some)
    def stumble(self, want: Want, end: bool, events: list[New]) -> None:
        """Fail the first row with a retry, give back the rest, and emit more."""
        self.claim(want, None, end)
        late: list[Outcome] = [Retried(350.0, "503"), *[Released()] * len(self.batch)]
        self.settle_batch(late, want.on_failed, want.dead_letter, end)
        self.emit(events)
        self.claim(want, None, end)

    @rule(want=wants, end=st.booleans())
    def die(self, want: Want, end: bool) -> None:
        self.claim(want, None, end)
        self.pass_time(700)

    @precondition(lambda self: self.leased)
    @rule(
        said=st.lists(st.tuples(st.integers(0, 40), outcomes), min_size=1, max_size=6),
        on_failed=policies,
        dead_letter=dead_letters,
        end=st.booleans(),
    )
    def settle(
        self, said: list[tuple[int, Outcome]], on_failed: OnFailed, dead_letter: DeadLetter | None, end: bool
    ) -> None:
        """Settle any leases, also those lost long ago, and some more than once."""
        self._settle([(self._lease(index), outcome) for index, outcome in said], on_failed, dead_letter, end)

    @precondition(lambda self: self.batch)
    @rule(
        said=st.lists(outcomes, min_size=1), on_failed=policies, dead_letter=dead_letters, end=st.booleans()
    )
    def settle_batch(
        self, said: list[Outcome], on_failed: OnFailed, dead_letter: DeadLetter | None, end: bool
    ) -> None:
        """Settle all that was claimed last, as a relay does."""
        if not self.batch:
            return
        pairs = [(pair, said[index % len(said)]) for index, pair in enumerate(self.batch)]
        self._settle(pairs, on_failed, dead_letter, end)
        self.batch = []

    @precondition(lambda self: self.batch and self.both.real.concurrent)
    @rule(
        said=st.lists(outcomes, min_size=1), on_failed=policies, dead_letter=dead_letters, end=st.booleans()
    )
    def settle_free(
        self, said: list[Outcome], on_failed: OnFailed, dead_letter: DeadLetter | None, end: bool
    ) -> None:
        """Settle what another transaction had locked; what still is locked stays as it was."""
        batch, self.batch = self.batch, []

        async def act(side: Side) -> Any:
            settlements = [
                Settlement(self._of(side, pair), said[index % len(said)]) for index, pair in enumerate(batch)
            ]
            policy: Any = {"on_failed": on_failed, "dead_letter": dead_letter}
            try:
                return self._labels(side, await side.store.settle(settlements, **policy, wait=False)), []
            except RowsLocked as locked:
                return self._labels(side, locked.lost), self._labels(side, locked.rows)

        self.both.met["left"] += bool(self.check("settle what is free", act, end)[1])

    def _settle(
        self,
        said: Sequence[tuple[Pair, Outcome]],
        on_failed: OnFailed,
        dead_letter: DeadLetter | None,
        end: bool,
    ) -> None:
        async def act(side: Side) -> Any:
            settlements = [Settlement(self._of(side, pair), outcome) for pair, outcome in said]
            lost = await side.store.settle(settlements, on_failed=on_failed, dead_letter=dead_letter)
            return self._labels(side, lost)

        self.both.met["lost"] += bool(self.check("settle", act, end))

    @precondition(lambda self: self.leased)
    @rule(which=picks, lease=seconds, end=st.booleans())
    def extend(self, which: list[int], lease: float, end: bool) -> None:
        async def act(side: Side) -> Any:
            deliveries = [self._of(side, self._lease(index)) for index in which]
            try:
                return self._labels(side, await side.store.extend(deliveries, lease)), []
            except RowsLocked as locked:
                return self._labels(side, locked.lost), self._labels(side, locked.rows)

        self.check("extend", act, end)

    @precondition(lambda self: self._suspects())
    @rule(which=st.integers(0, 40), alone=st.booleans(), end=st.booleans())
    def hold_alone(self, which: int, alone: bool, end: bool) -> None:
        """Hold a suspect alone, as a relay does, also one whose lease was lost."""
        suspects = self._suspects()

        async def act(side: Side) -> Any:
            delivery = self._of(side, suspects[-1 - which % len(suspects)])
            return await side.store.hold_alone(delivery, alone)

        self.check("hold alone", act, end)
        self.both.met["held alone"] += 1

    def _suspects(self) -> list[Pair]:
        return [pair for pair in self.leased if pair.fake.suspect]

    @precondition(lambda self: self.leased)
    @rule(which=picks, on_failed=policies, end=st.booleans())
    def release(self, which: list[int], on_failed: OnFailed, end: bool) -> None:
        async def act(side: Side) -> Any:
            deliveries = [self._of(side, self._lease(index)) for index in which]
            return self._labels(side, await side.store.release(deliveries, on_failed=on_failed))

        self.check("release", act, end)

    def _lease(self, index: int) -> Pair:
        return self.leased[-1 - index % len(self.leased)]

    def _of(self, side: Side, pair: Pair) -> Delivery:
        return pair.fake if side is self.both.fake else pair.real

    def _labels(self, side: Side, ids: frozenset[UUID]) -> list[Label]:
        name = "fake" if side is self.both.fake else "real"
        return sorted(self.both.label(name, id_) for id_ in ids)

    # Destinations.

    @rule(name=rarely, change=st.sampled_from(sorted(CHANGES)), length=seconds, end=st.booleans())
    def change(self, name: str, change: str, length: float, end: bool) -> None:
        self.check(change, lambda side: CHANGES[change](side, name, length), end)

    @precondition(lambda self: not any(transaction.locked for transaction in self.both.open))
    @rule(name=rarely, length=st.none() | seconds | st.none() | st.none())
    def hold(self, name: str, length: float | None) -> None:
        """By an operator: for a time, or no longer."""
        for side in (self.both.fake, self.both.real):
            side.hold(name, length)
        self.both.compared["hold"] += 1
        self.both.look()

    @rule(name=names, count=st.integers(1, 5), rate=st.sampled_from((0.01, 0.1, 100.0)), end=st.booleans())
    def reserve(self, name: str, count: int, rate: float, end: bool) -> None:
        self.check("reserve", lambda side: side.store.reserve(name, count, rate), end)

    # Upkeep.

    @rule(name=members, live=seconds, leaves=st.booleans())
    def beat(self, name: str, live: float, leaves: bool) -> None:
        async def act(side: Side) -> Any:
            if leaves:
                return await side.upkeep.members.leave(name)
            return (await side.upkeep.members.beat(Member(name, "host", 1, "1"), live)).alive

        self.check("leave" if leaves else "beat", act)

    @rule(name=members, length=st.sampled_from((250.0, 2050.0, 2050.0, None)))
    def lead(self, name: str, length: float | None) -> None:
        if length is None:
            self.check("resign", lambda side: side.upkeep.members.resign(name))
        else:
            term = self.check("lead", lambda side: side.upkeep.members.lead(name, length))
            self.terms += [] if term is None else [term]

    @rule(
        chore=st.sampled_from(sorted(CHORES)), past=past, name=names, end=st.booleans(), block=st.booleans()
    )
    def upkeep(self, chore: str, past: int, name: str, end: bool, block: bool) -> None:
        if past == 1:
            self.lead("relay-1", 2050.0)
        term = self._term(past)
        self.check(chore, lambda side: CHORES[chore](side, term, name, block), end)

    def _term(self, past: int) -> int:
        return self.terms[-past] if past <= len(self.terms) else self.terms[0]


EXAMPLES = int(os.environ.get("RELAYBOX_FIDELITY", "0"))
HISTORIES = {"postgresql-18": 20, "mariadb": 12, "sqlite": 12}
COMMON = settings(
    stateful_step_count=40,
    derandomize=not EXAMPLES,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink] if "RELAYBOX_SHRINK" in os.environ else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def open_real(module_database: Callable[[str], str]) -> Callable[[str], Real]:
    databases: dict[str, str] = {}
    return lambda kind: Real(databases.get(kind) or databases.setdefault(kind, module_database(kind)))


@pytest.fixture
def pair(open_real: Callable[[str], Real]) -> Iterator[Callable[..., Pairing]]:
    pairings: list[Pairing] = []

    def make(kind: str, server: type[UpkeepServer] = UpkeepServer) -> Pairing:
        pairings.append(Pairing(open_real(kind), server))
        return pairings[-1]

    yield make
    for pairing in pairings:
        pairing.close()


@pytest.mark.parametrize("kind", HISTORIES)
def test_the_fake_answers_as_the_real_one(
    kind: str, pair: Callable[..., Pairing], record_property: Callable[[str, object], None]
) -> None:
    pairing = pair(kind)
    histories = EXAMPLES or HISTORIES[kind]
    run_state_machine_as_test(lambda: Machine(pairing), settings=settings(COMMON, max_examples=histories))
    record_property("fidelity", [kind, histories, pairing.compared.total(), dict(pairing.met)])
    assert pairing.compared.total() > 20 * histories
    assert {"claimed", "parked", "held", "lost"} <= (+pairing.met).keys()


class SettlesAnyLease(UpkeepServer):
    def holds(self, row: Row, item: Item) -> bool:
        return row.token is not None and row.status == "pending"


class ParksNothing(UpkeepServer):
    def do_park(self, transaction: Transaction, ids: Any) -> Rows:
        return []


class CountsEveryDeath(UpkeepServer):
    def do_lease(self, transaction: Transaction, ids: Any, token: str, owner: str, seconds: float) -> Rows:
        super().do_lease(transaction, ids, token, owner, seconds)
        for id_ in ids:
            row = self.database.change(transaction, id_)
            row.attempts += row.crashes == 2
        return []


class LocksNothing(UpkeepServer):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        database.lockable = lambda transaction, key: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("sqlite", SettlesAnyLease),
        ("sqlite", CountsEveryDeath),
        # These are found within a minute.
        *[("sqlite", ParksNothing), ("postgresql-18", LocksNothing)][: 2 * bool(EXAMPLES)],
    ],
)
def test_a_wrong_fake_is_found(kind: str, wrong: type[UpkeepServer], pair: Callable[..., Pairing]) -> None:
    pairing = pair(kind, wrong)
    with pytest.raises(Disagreement):
        run_state_machine_as_test(lambda: Machine(pairing), settings=settings(COMMON, max_examples=200))
