"""``once``: an inbox in the transaction that Django has open."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import Error, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.databases import connection_of, dialect_of, get_tables, run_ours
from relaybox.core.settings import Settings
from relaybox.core.values import parse_name
from relaybox.database.drivers.driver import failed
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.errors import ConfigError, EmitError, NotInTransaction
from relaybox.receive.mark import Key, forget, inbox_statements, key_of, mark, note_left
from relaybox.sinks.open import handler_of

if TYPE_CHECKING:
    from relaybox.core.event import Event

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
Handlers = dict[str, Callable[..., Any]]


@contextmanager
def once(message_id: Any, *, consumer: str, using: str | None = None) -> Iterator[bool]:
    """Mark a message as processed in the open ``atomic()``: ``with once(…) as first:``.

    ``message_id`` is text, an integer or a UUID, or the ``relaybox.Event`` whose id it is. ``first`` is False
    where this consumer has processed it before; do nothing then. Where another transaction is processing it,
    this one waits for it to end. A block that raises leaves no mark. ``using`` is the database's alias; left
    out, the one that routers choose for writing ``InboxMessage``.

    Raises ``InvalidField``, ``NotInTransaction`` outside ``atomic()`` and ``TransactionFailed`` before
    anything reaches the database, ``SchemaError`` where the tables are missing.
    """
    connection, key = connection_of(using or _default_alias()), key_of(consumer, message_id)
    first = _write(connection, functools.partial(mark, key=key))
    try:
        yield first
    except BaseException as error:
        if first:
            _take_back(connection, key, error)
        raise


def only_once(
    *, consumer: str | None = None, id_of: Callable[[Any], Any] | None = None, using: str | None = None
) -> Callable[[Function], Function]:
    """Make a function do nothing, and return None, for a message that it has processed before.

    Its first argument is the message: an event or an id, or ``id_of`` says which it has. It is called in an
    ``atomic()``: write ``@transaction.atomic`` above. ``consumer`` is ``module.function`` unless it is given.
    """

    def decorate(function: Function) -> Function:
        name = parse_name(consumer or f"{function.__module__}.{function.__qualname__}", "consumer")
        if inspect.iscoroutinefunction(function):
            fix = "Django's transactions are synchronous; make it a plain function"
            raise ConfigError(f"only_once: {name} is an async function: {fix}")

        @functools.wraps(function)
        def called(message: Any, *args: Any, **options: Any) -> Any:
            with once(id_of(message) if id_of else message, consumer=name, using=using) as first:
                return function(message, *args, **options) if first else None

        return called  # type: ignore[return-value]

    return decorate


def in_atomic(using: str, settings: Settings, handlers: Handlers) -> tuple[Settings, Handlers]:
    """Handlers that say ``once`` as functions that mark in an ``atomic()`` of this database.

    The relay is told nothing of it: it would open connections of its own.
    """
    once = [one for one in settings.destinations if one.once]
    if not once:
        return settings, handlers
    plain = [dataclasses.replace(one, once=False) if one.once else one for one in settings.destinations]
    marking = dict(handlers)
    for one in once:
        # What cannot be loaded is told when its sink is opened, and holds up no other.
        with suppress(ConfigError):
            marking[one.name] = handler_of(one, handlers)
        if one.name in marking:
            marking[one.name] = _marking(using, one.name, marking[one.name])
    return dataclasses.replace(settings, destinations=plain), marking


@functools.lru_cache(maxsize=256)
def _marking(using: str, name: str, function: Callable[..., Any]) -> Callable[[Event], None]:
    from relaybox.receive.once_handler import check_done, with_connection
    from relaybox.sinks.handler import is_async

    if is_async(name, function):
        fix = "Django's transactions are synchronous; make it a plain function"
        raise ConfigError(f"handler {name!r}: once=True: it is an async function: {fix}")
    called = with_connection(function)

    @functools.wraps(function)
    def marking(event: Event) -> None:
        with transaction.atomic(using=using):
            connection = connection_of(using)
            if _write(connection, functools.partial(mark, key=key_of(name, event))):
                check_done(called(event, connection))

    return marking


def _default_alias() -> str:
    from relaybox.contrib.django.models import InboxMessage

    alias: str = router.db_for_write(InboxMessage)
    return alias


def _write(connection: BaseDatabaseWrapper, work: Callable[[Statements], Steps[T]]) -> T:
    if connection.needs_rollback:
        raise failed("Django")
    if not connection.in_atomic_block and connection.get_autocommit():
        raise NotInTransaction(
            "no transaction is open, so the mark would commit apart from the work it stands for; write"
            " `with transaction.atomic():` around both"
        )
    writing = work(_statements(dialect_of(connection).name, connection))
    return run_ours(connection, writing)


_made: dict[str, Statements] = {}


def _statements(dialect: str, connection: BaseDatabaseWrapper) -> Statements:
    found = _made.get(dialect)
    return found or _made.setdefault(
        dialect, inbox_statements(get_tables(), dialect_of(connection), "format")
    )


def _take_back(connection: BaseDatabaseWrapper, key: Key, error: BaseException) -> None:
    try:
        _write(connection, functools.partial(forget, key=key))
    except (EmitError, Error) as failure:
        # Where the transaction can only be rolled back, there is nothing to say.
        if not isinstance(failure, EmitError):
            note_left(error, key, failure)
