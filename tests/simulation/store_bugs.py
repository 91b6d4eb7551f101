"""Bugs in a store: in the steps that are the product's own, or in the fake's statement of the same name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from relaybox import ordering
from relaybox.event import Delivery
from relaybox.ordering import Candidate
from relaybox.outcome import Released
from relaybox.stores import steps as steps_module
from relaybox.stores.steps import StoreSteps
from tests.simulation.application import Application
from tests.simulation.bugs import Bug, faulty
from tests.simulation.database import Database, Emitted, Row, Transaction
from tests.simulation.plan import Plan
from tests.simulation.queries import Rows
from tests.simulation.statements import Item, Items, Place, Server
from tests.simulation.upkeep_statements import UpkeepServer

_claim, _effect = StoreSteps.claim, steps_module._effect
_is_free, _lease, _settle, _read = Server._is_free, Server.do_lease, Server.do_settle, Emitted.read
_extend, _copy, _execute = Server.do_extend, Server.do_copy_failed, Server.execute
_rollback = Database.rollback

NO_SWEEP = (UpkeepServer, "do_upkeep__parked", lambda *_, **__: [])
"""The sweep would mend what is left parked, and so hide why."""


def _fenced_by(holds: Callable[[Row, Item], bool], statement: Callable[..., Rows]) -> Callable[..., Rows]:
    """The statement, which takes a row for its own where ``holds``."""

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
    return _claim(self, replace(want, ordered=False))


def _claim_swapped(self: StoreSteps, want: Any) -> Any:
    return _claim(self, replace(want, on_failed="skip" if want.on_failed == "block" else "block"))


def _claim_without_dead_letter(self: StoreSteps, want: Any) -> Any:
    return _claim(self, replace(want, dead_letter=None))


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
    """The lease of rows, where ``count`` says by how much that raises attempts."""

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


def _effect_without_return(outcome: Any) -> dict[str, Any]:
    effect = _effect(outcome)
    return {**effect, "given_back": 0} if isinstance(outcome, Released) else effect


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
        return [[id_, at] for at, id_ in old]
    server.do_upkeep__remove(transaction, [id_ for _, id_ in old])
    return [[at] for at, _ in old]


def _emit_though_rolled_back(self: Database, transaction: Transaction) -> None:
    if isinstance(transaction.node, Application):
        self.commit(transaction)
    else:
        _rollback(self, transaction)


def _read_cut(emitted: Emitted, attempts: int, crashes: int) -> tuple[Any, ...]:
    payload = emitted.payload and emitted.payload[:7]
    return _read(emitted._replace(payload=payload), attempts, crashes)


def _has_order(plan: Plan) -> bool:
    return plan.destinations[0].ordered


def _dies_between(plan: Plan) -> bool:
    """After what it settled is committed, and before the next of the key is made due."""
    return _has_order(plan) and plan.flavour == "pipeline" and plan.heals and faulty("crash")(plan)


def _prunes(plan: Plan) -> bool:
    return any(destination.retention < 10 for destination in plan.destinations)


def _copies(plan: Plan) -> bool:
    return any(destination.dead_letter for destination in plan.destinations)


def _kills_and_copies(plan: Plan) -> bool:
    return _copies(plan) and "killer" in plan.faults and plan.heals


def _loses_leases(plan: Plan) -> bool:
    return plan.relays > 1 and faulty("stall", "cut off")(plan)


def _copies_twice(plan: Plan) -> bool:
    return _copies(plan) and "lost answers" in plan.faults


def _breaks_half_open(plan: Plan) -> bool:
    return plan.heals and "outage" in plan.faults and faulty("lost answers", "crash point")(plan)


_died = faulty("crash", "crash point", "killer", "stall")

STORE_BUGS = (
    Bug(
        "looks only above the last position that it saw",
        [(Server, "_is_free", _free_above_the_cursor), (Server, "do_lease", _lease_and_move_the_cursor)],
    ),
    Bug("claims what is leased", [(Server, "_is_free", staticmethod(_free_though_leased))]),
    Bug(
        "never takes over a lease that ran out",
        [(Server, "_is_free", staticmethod(_free_if_never_leased))],
        _died,
    ),
    Bug("claims without a look at keys", [(StoreSteps, "claim", _claim_without_keys)], _has_order),
    Bug("swaps block and skip", [(StoreSteps, "claim", _claim_swapped)], faulty("poison")),
    Bug(
        "looks for the head of a key among what is pending",
        [(Server, "_is_open", staticmethod(lambda row, block: row.status == "pending"))],
        faulty("poison", "killer"),
    ),
    Bug(
        "takes the first that is due for the head of its key",
        [(Server, "_head", _first_that_is_due)],
        _has_order,
    ),
    Bug("a run steps over what is not free", [(ordering, "_run", _run_with_gaps)], _has_order),
    Bug("leases by the relay's own clock", [(Server, "execute", _by_the_relays_clock)]),
    Bug(
        "counts attempts when it settles",
        [(Server, "do_lease", _lease_counting(lambda row: 0)), (Server, "do_settle", _settle_and_count)],
        faulty("killer"),
    ),
    Bug(
        "a killer's deaths are not counted",
        [(Server, "do_lease", _lease_counting(lambda row: int(row.token is None)))],
        faulty("killer"),
    ),
    Bug(
        "the death of a batch is counted",
        [(Server, "do_lease", _lease_counting(lambda row: 1))],
        faulty("killer"),
    ),
    Bug(
        "what died in all of its attempts is tried again", [(Delivery, "exhausted", False)], faulty("killer")
    ),
    Bug(
        "settles without the lease's token",
        [(Server, "do_settle", _fenced_by(_is_pending, _settle))],
        _loses_leases,
    ),
    Bug(
        "extends without the lease's token",
        [(Server, "do_extend", _fenced_by(_is_pending, _extend))],
        _loses_leases,
    ),
    Bug("extends what is settled", [(Server, "do_extend", _fenced_by(_is_there, _extend))]),
    Bug("leaves the token when it settles", [(Server, "do_settle", _settle_and_leave_the_token)]),
    Bug("a release keeps the attempt", [(steps_module, "_effect", _effect_without_return)]),
    Bug(
        "parked rows are never made due",
        [(StoreSteps, "_make_heads_due", lambda *_: []), NO_SWEEP],
        _has_order,
    ),
    Bug("nobody looks for what a death left parked", [NO_SWEEP], _dies_between),
    Bug(
        "copies a dead letter whoever holds the row",
        [(Server, "do_copy_failed", _fenced_by(_is_there, _copy))],
        _copies_twice,
    ),
    Bug("writes no dead letter", [(Server, "do_copy_failed", lambda *_, **__: [])], _copies),
    Bug(
        "writes no dead letter of a killer",
        [(StoreSteps, "claim", _claim_without_dead_letter)],
        _kills_and_copies,
    ),
    Bug(
        "a circuit whose prober died is never probed again",
        [(Server, "do_probe", _probe_only_what_is_open)],
        _breaks_half_open,
    ),
    Bug("prunes what is pending", [(UpkeepServer, "do_upkeep__delivered", _prune_whatever_is_old)], _prunes),
    Bug("delivers what was rolled back", [(Database, "rollback", _emit_though_rolled_back)]),
    Bug("cuts payloads", [(Emitted, "read", _read_cut)]),
)
