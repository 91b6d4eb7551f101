"""After the commit of a transaction that emitted: tell the relays which destinations have events.

That a transaction committed is known of SQLAlchemy's sessions, which have an event for it, and of the blocks
of ``outbox.transaction``. Engines have an event only before their COMMIT, and drivers have none: what is
emitted there, relays find by polling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction

from relaybox.core.event import Emitted
from relaybox.database.drivers.driver import Channel
from relaybox.database.drivers.sqlalchemy import SqlalchemyChannel
from relaybox.database.steps import Steps
from relaybox.emit.wakes.wake import Caller

_WAITING = "relaybox.waiting"


class Blocks:
    """The blocks of ``outbox.transaction`` that are open, and the destinations of what was emitted in each.

    By the id of the connection, which is no other's while its block holds it.
    """

    def __init__(self) -> None:
        self._names: dict[int, list[set[str]]] = {}

    def enter(self, connection: Any) -> None:
        """A block begins, perhaps inside another."""
        self._names.setdefault(id(connection), []).append(set())

    def add(self, connection: Any, names: Iterable[str]) -> bool:
        """Whether the connection is in a block, which then has these names."""
        blocks = self._names.get(id(connection))
        if blocks is None:
            return False
        blocks[-1].update(names)
        return True

    def leave(self, connection: Any, *, kept: bool, committed: bool) -> set[str]:
        """The names that are committed now. Those of a savepoint that was kept go to the block around it."""
        blocks = self._names[id(connection)]
        names = blocks.pop()
        if not blocks:
            del self._names[id(connection)]
        if kept and committed:
            return names
        if kept and blocks:
            blocks[-1] |= names
        return set()


def told(
    writing: Steps[list[Emitted]],
    way: Channel,
    alone: bool,
    caller: Caller,
    blocks: Blocks,
    unserved: frozenset[str] = frozenset(),
) -> Steps[list[Emitted]]:
    """The same writing; when it is committed, or written where it commits ``alone``, the caller is told.

    Not of the destinations that are ``unserved``: no relay would come.
    """
    emitted = yield from writing
    names = {name for one in emitted for name in one.destinations} - unserved
    if alone:
        caller.call(names)
    elif not blocks.add(way.connection, names) and isinstance(way, SqlalchemyChannel) and way.session:
        _wait(way.session, way.connection, caller, names)
    return emitted


@dataclass(slots=True)
class _Waiting:
    """The destinations of a session's events, each with the least depth of savepoints it was emitted at."""

    connection: sa.Connection
    depths: dict[str, int] = field(default_factory=dict)


def _wait(session: Session, connection: sa.Connection, caller: Caller, names: Iterable[str]) -> None:
    waiting: dict[Caller, _Waiting] = session.info.setdefault(_WAITING, {})
    depths = waiting.setdefault(caller, _Waiting(connection)).depths
    depth = depth_of(session.get_nested_transaction())
    for name in names:
        depths[name] = min(depth, depths.get(name, depth))


# At every session, which costs a look into its ``info``; to listen to each one that emits would cost more.
# When this module is imported, because other threads may be using the list of listeners later.
@sa.event.listens_for(Session, "after_commit")
def _call(session: Session) -> None:
    """Savepoints that are released come here too, and sessions inside a transaction of their connection's."""
    if _WAITING not in session.info or session.get_nested_transaction() is not None:
        return
    waiting: dict[Caller, _Waiting] = session.info.pop(_WAITING)
    for caller, one in waiting.items():
        if one.depths and not one.connection.in_transaction():
            caller.call(one.depths)


@sa.event.listens_for(Session, "after_rollback")
def _forget(session: Session) -> None:
    """Of a savepoint: what was emitted only since then."""
    if _WAITING not in session.info:
        return
    depth = depth_of(session.get_nested_transaction())
    for one in session.info[_WAITING].values():
        one.depths = {name: least for name, least in one.depths.items() if least < depth}


@sa.event.listens_for(Session, "after_transaction_end")
def _end(session: Session, transaction: SessionTransaction) -> None:
    """A savepoint that ended without a rollback belongs to what is around it."""
    if _WAITING not in session.info:
        return
    if transaction.parent is None:
        del session.info[_WAITING]
    elif transaction.nested:
        outer = depth_of(transaction.parent)
        for one in session.info[_WAITING].values():
            one.depths = {name: min(least, outer) for name, least in one.depths.items()}


def depth_of(transaction: SessionTransaction | None) -> int:
    """How many savepoints a session's transaction is in, itself included."""
    depth = 0
    while transaction is not None:
        depth += transaction.nested
        transaction = transaction.parent
    return depth
