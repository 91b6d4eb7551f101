"""Call relays after the commit of a transaction that emitted.

Only SQLAlchemy sessions and blocks of ``outbox.transaction`` report a commit. Engines have an event only
before COMMIT, and drivers have none: relays find those events by polling.
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
from relaybox.emit.wakes.local import Caller

_WAITING = "relaybox.waiting"


class AfterCommit:
    """Calls ``caller`` with the destinations of committed events.

    It knows the open blocks by the id of their connection: unique while its block holds it.
    """

    def __init__(self, caller: Caller | None = None) -> None:
        self.caller = caller
        self._blocks: dict[int, list[set[str]]] = {}

    def call(self, emitted: Iterable[Emitted], way: Channel, alone: bool, unserved: frozenset[str]) -> None:
        """Call after the commit, or at once if ``alone``, but not for ``unserved``."""
        if self.caller is None:
            return
        names = {name for one in emitted for name in one.destinations} - unserved
        if alone:
            self.caller.call(names)
        elif (blocks := self._blocks.get(id(way.connection))) is not None:
            blocks[-1].update(names)
        elif isinstance(way, SqlalchemyChannel) and way.session:
            _wait(way.session, way.connection, self.caller, names)

    def enter(self, connection: Any) -> None:
        """Open a block, perhaps inside another."""
        self._blocks.setdefault(id(connection), []).append(set())

    def leave(self, connection: Any, *, kept: bool, committed: bool) -> None:
        """Close a block and call for what it committed; a kept savepoint passes its names outwards."""
        blocks = self._blocks[id(connection)]
        names = blocks.pop()
        if not blocks:
            del self._blocks[id(connection)]
        if kept and committed:
            if names and self.caller is not None:
                self.caller.call(names)
        elif kept and blocks:
            blocks[-1] |= names


@dataclass(slots=True)
class _Waiting:
    """Destinations of a session, each with the lowest savepoint depth it was emitted at."""

    connection: sa.Connection
    depths: dict[str, int] = field(default_factory=dict)


def _wait(session: Session, connection: sa.Connection, caller: Caller, names: Iterable[str]) -> None:
    waiting: dict[Caller, _Waiting] = session.info.setdefault(_WAITING, {})
    depths = waiting.setdefault(caller, _Waiting(connection)).depths
    depth = depth_of(session.get_nested_transaction())
    for name in names:
        depths[name] = min(depth, depths.get(name, depth))


# Listening to all sessions costs a look into ``info``; a listener for each that emits costs more. Register at
# import, because later other threads may be using the list of listeners.
@sa.event.listens_for(Session, "after_commit")
def _call(session: Session) -> None:
    """Call the relays, unless only a savepoint ended or the connection is still in a transaction."""
    if _WAITING not in session.info or session.get_nested_transaction() is not None:
        return
    waiting: dict[Caller, _Waiting] = session.info.pop(_WAITING)
    for caller, one in waiting.items():
        if one.depths and not one.connection.in_transaction():
            caller.call(one.depths)


@sa.event.listens_for(Session, "after_rollback")
def _forget(session: Session) -> None:
    if _WAITING not in session.info:
        return
    depth = depth_of(session.get_nested_transaction())
    for one in session.info[_WAITING].values():
        one.depths = {name: least for name, least in one.depths.items() if least < depth}


@sa.event.listens_for(Session, "after_transaction_end")
def _end(session: Session, transaction: SessionTransaction) -> None:
    if _WAITING not in session.info:
        return
    if transaction.parent is None:
        del session.info[_WAITING]
    elif transaction.nested:
        outer = depth_of(transaction.parent)
        for one in session.info[_WAITING].values():
            one.depths = {name: min(least, outer) for name, least in one.depths.items()}


def depth_of(transaction: SessionTransaction | None) -> int:
    """Return the number of open savepoints around a session's transaction; a savepoint counts itself."""
    depth = 0
    while transaction is not None:
        depth += transaction.nested
        transaction = transaction.parent
    return depth
