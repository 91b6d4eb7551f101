"""Emit domain events of SQLAlchemy models: recorded on an object, written when its session flushes.

Each is written once, in the order recorded, after a flush: new objects have ids then. Without a flush it is
written before the commit.

An event is *recorded* and *written* at some depth of savepoints. A rollback of depth ``d`` forgets events
recorded at ``d`` or deeper. Those recorded outside but written inside are written again, because the database
lost them. A release lowers both depths to ``d - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Unpack
from weakref import WeakSet

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.orm import Session, SessionTransaction, object_session, scoped_session, sessionmaker
from sqlalchemy.orm.attributes import flag_dirty

from relaybox.database.drivers.driver import failed
from relaybox.database.drivers.find import name_of
from relaybox.emit.committed import depth_of
from relaybox.emit.emitter import Emitter
from relaybox.emit.row import Call, EmitOptions
from relaybox.errors import NotInTransaction, UnsupportedConnection

_EVENTS = "relaybox"
_KEPT = "_relaybox_events"
_ASYNCIO = "sqlalchemy.ext.asyncio"


@dataclass(slots=True)
class _Recorded:
    instance: Any
    given: Call
    depth: int = 0
    written: int = 0

    def call(self) -> Call:
        """Return the call with the primary key, which a new object has only after the flush."""
        if self.given.aggregate_id is not None:
            return self.given
        return replace(self.given, aggregate_id=_identity(self.instance))


@dataclass(slots=True)
class _Events:
    """The events recorded in a session's transaction.

    ``ending`` holds the transaction and its savepoints whose ``before_commit`` we have seen and whose end we
    have not.
    """

    waiting: list[_Recorded] = field(default_factory=list)
    written: list[_Recorded] = field(default_factory=list)
    ending: list[SessionTransaction] = field(default_factory=list)
    flushing: bool = False


class EventSource:
    """A mixin for declarative models; their objects record events.

        class Order(EventSource, Base): ...

        outbox.attach(sessionmaker)
        order.record("order.paid", {"total": order.total})

    An object without a session keeps its events until it is added to one, for which ``outbox.attach`` must
    have been called. A rollback forgets the events recorded in its transaction or savepoint.
    """

    def record(
        self,
        event_type: str,
        payload: Any,
        *,
        aggregate_type: str | None = None,
        aggregate_id: Any = None,
        **options: Unpack[EmitOptions],
    ) -> None:
        """Emit this event when the session flushes.

        ``aggregate_type`` defaults to the class's name, ``aggregate_id`` to the primary key after the flush,
        with composite parts joined by ``:``. The options are those of ``emit``.
        """
        kind = type(self).__name__ if aggregate_type is None else aggregate_type
        recorded = _Recorded(self, Call(kind, aggregate_id, event_type, payload, **options))
        session = object_session(self)
        if session is None:
            self.__dict__.setdefault(_KEPT, []).append(recorded)
        else:
            _enqueue(session, [recorded])


class Recorder:
    """Listens to sessions and emits what their objects record."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        # Not sa.event.contains: it compares by id(), so a new session can be taken for a dead one.
        self._places: WeakSet[Any] = WeakSet()

    def attach(self, target: Any) -> None:
        """Listen to a session, a class of sessions, or a session maker."""
        place = _listenable(target)
        classes = place.__mro__ if isinstance(place, type) else (place, *type(place).__mro__)
        if any(one in self._places for one in classes):
            return
        self._places.add(place)
        for name in ("after_attach", "after_flush_postexec", "before_commit", "after_rollback"):
            sa.event.listen(place, name, getattr(self, name))
        sa.event.listen(place, "after_transaction_end", self.after_transaction_end)
        # Before other listeners: the flush writes what they record.
        sa.event.listen(place, "before_flush", self.before_flush, insert=True)

    def after_attach(self, session: Session, instance: Any) -> None:
        """Take over the events that an object kept until it was added to the session."""
        if isinstance(instance, EventSource) and (kept := instance.__dict__.get(_KEPT)):
            _enqueue(session, kept)
            del instance.__dict__[_KEPT]

    def before_flush(self, session: Session, context: Any, instances: Any) -> None:
        """Note that what is recorded during this flush needs no other one."""
        if (events := session.info.get(_EVENTS)) is not None:
            events.flushing = True

    def after_flush_postexec(self, session: Session, context: Any) -> None:
        """Write the waiting events, because new objects have their ids now."""
        self.write(session)
        if (events := session.info.get(_EVENTS)) is not None:
            events.flushing = False

    def before_commit(self, session: Session) -> None:
        """Write the events of objects that had no changes to flush."""
        events = session.info.get(_EVENTS)
        if events is not None and events.waiting:
            session.flush()
            self.write(session)
        events = session.info.setdefault(_EVENTS, _Events())
        # A flush that another listener refused did not end.
        events.flushing = False
        events.ending.append(session.get_nested_transaction() or session.get_transaction())

    def after_rollback(self, session: Session) -> None:
        """Forget what was recorded since the savepoint; write again what was recorded before it."""
        events = session.info.get(_EVENTS)
        if events is None:
            return
        depth = depth_of(session.get_nested_transaction())
        again = [event for event in events.written if event.depth < depth <= event.written]
        events.waiting = again + [event for event in events.waiting if event.depth < depth]
        events.written = [event for event in events.written if event.written < depth]

    def after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        """Move the events of a released savepoint outwards; forget all at the outermost end."""
        events = session.info.get(_EVENTS)
        if events is None:
            return
        if transaction.parent is None:
            del session.info[_EVENTS]
        elif transaction.nested:
            events.flushing = False
            events.ending = [one for one in events.ending if one is not transaction]
            outer = depth_of(transaction.parent)
            for event in (*events.waiting, *events.written):
                event.depth = min(event.depth, outer)
                event.written = min(event.written, outer)

    def write(self, session: Session) -> None:
        """Write the waiting events of objects that have an id."""
        events = session.info.get(_EVENTS)
        if events is None or not events.waiting:
            return
        depth = depth_of(session.get_nested_transaction())
        ready = [event for event in events.waiting if sa.inspect(event.instance).has_identity]
        events.waiting = [event for event in events.waiting if not sa.inspect(event.instance).has_identity]
        for event in ready:
            event.written = depth
        try:
            self._emitter.write(session, [event.call() for event in ready], autocommit=False)
        except BaseException:
            events.waiting = ready + events.waiting
            raise
        events.written += ready


# Listen to all sessions: one that was not attached has no Recorder. Register at import, because later other
# threads may be using the list of listeners.
@sa.event.listens_for(Session, "before_attach")
def _refuse_unheard(session: Session, instance: Any) -> None:
    if isinstance(instance, EventSource) and instance.__dict__.get(_KEPT):
        _recorder_of(session)


def _recorder_of(session: Session) -> Recorder:
    for listener in session.dispatch.before_commit:
        if isinstance(recorder := getattr(listener, "__self__", None), Recorder):
            return recorder
    raise UnsupportedConnection(
        "this session emits no recorded events; call outbox.attach(...) with its sessionmaker or class"
    )


def _enqueue(session: Session, recorded: list[_Recorded]) -> None:
    if not session.is_active:
        raise failed("SQLAlchemy session's")
    recorder = _recorder_of(session)
    if not session.in_transaction():
        # Without a transaction nothing would report a rollback, and the event would survive it.
        if not session.autobegin:
            raise NotInTransaction(
                "the session does not begin by itself (autobegin=False); call session.begin()"
            )
        session.begin()
    depth = depth_of(session.get_nested_transaction())
    for event in recorded:
        event.depth = depth
    events = session.info.setdefault(_EVENTS, _Events())
    events.waiting.extend(recorded)
    if events.ending and not events.flushing:
        # A listener that runs after ours records. The commit flushes until nothing has changed.
        for event in recorded:
            if sa.inspect(event.instance).persistent:
                flag_dirty(event.instance)
        if any(sa.inspect(event.instance).deleted for event in recorded):
            recorder.write(session)


def _identity(instance: Any) -> Any:
    identity = sa.inspect(instance).identity
    return identity[0] if len(identity) == 1 else ":".join(map(str, identity))


def _listenable(target: Any) -> Any:
    """Return the sync session or class to listen to; async ones go by name, as greenlet may be missing."""
    is_class = isinstance(target, type)
    names = [name_of(base) for base in (target if is_class else type(target)).__mro__]
    if f"{_ASYNCIO}.session.AsyncSession" in names:
        return target.sync_session_class if is_class else target.sync_session
    if not is_class:
        if f"{_ASYNCIO}.session.async_sessionmaker" in names:
            return _sync_class(target)
        if f"{_ASYNCIO}.scoping.async_scoped_session" in names or isinstance(target, scoped_session):
            return _listenable(target.session_factory)
        if isinstance(target, sessionmaker):
            return target.class_
    if isinstance(target, Session) or (is_class and issubclass(target, Session)):
        return target
    fix = "pass the sessionmaker, as in outbox.attach(sessionmaker(engine))"
    raise UnsupportedConnection(
        f"{target!r} is not an SQLAlchemy session, class of sessions or sessionmaker; {fix}"
    )


def _sync_class(maker: Any) -> Any:
    """Return the sync session class of an async_sessionmaker, which gets one of its own."""
    made = maker.kw.get("sync_session_class", maker.class_.sync_session_class)
    if not isinstance(made, sessionmaker):
        made = sessionmaker(class_=made)
        maker.configure(sync_session_class=made)
    return made.class_
