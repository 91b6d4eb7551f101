"""The inbox in Django's open transaction."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import Error, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.databases import connection_of, dialect_of, get_tables, in_transaction, run_ours
from relaybox.contrib.django.handlers import PLAIN
from relaybox.core.event import Event
from relaybox.core.settings import Settings
from relaybox.core.values import parse_name
from relaybox.database.dialects import DIALECTS
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.errors import ConfigError, EmitError, NotInTransaction
from relaybox.receive.inbox import Key, forget, inbox_statements, key_of, mark, note_left
from relaybox.sinks.open import Handlers, handler_of

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def once(message_id: Any, *, consumer: str, using: str | None = None) -> Iterator[bool]:
    """Mark a message as processed in the open ``atomic()``: ``with once(…) as first:``.

    ``message_id`` is text, an integer, a UUID or a ``relaybox.Event``. ``first`` is False if this consumer
    has processed the message before; skip the work then. If another transaction is processing it, wait until
    that ends. A block that raises leaves no mark. ``using`` defaults to the routers' choice.

    Raise ``InvalidField``, ``TransactionFailed``, or ``NotInTransaction`` outside ``atomic()`` before
    anything reaches the database. Raise ``SchemaError`` if the tables are missing.
    """
    from relaybox.contrib.django.models import InboxMessage

    connection = connection_of(using or router.db_for_write(InboxMessage))
    key = key_of(consumer, message_id)
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
    """Make a function do nothing and return None for a message that it has processed before.

    Its first argument is an event, an id, or a message for ``id_of``. Call it in ``atomic()``, for example
    with ``@transaction.atomic`` above. ``consumer`` defaults to ``module.function``.
    """

    def decorate(function: Function) -> Function:
        name = parse_name(consumer or f"{function.__module__}.{function.__qualname__}", "consumer")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"only_once: {name} is an async function: {PLAIN}")

        @functools.wraps(function)
        def called(message: Any, *args: Any, **options: Any) -> Any:
            with once(id_of(message) if id_of else message, consumer=name, using=using) as first:
                return function(message, *args, **options) if first else None

        return called  # type: ignore[return-value]

    return decorate


def in_atomic(using: str, settings: Settings, handlers: Handlers) -> tuple[Settings, Handlers]:
    """Make handlers with ``once`` mark in ``atomic()`` here; the relay would open its own connections."""
    once = [one for one in settings.destinations if one.once]
    if not once:
        return settings, handlers
    marking = dict(handlers)
    for one in once:
        # A handler that cannot be loaded is reported when its sink opens, and does not stop the others.
        with suppress(ConfigError):
            marking[one.name] = handler_of(one, handlers)
        if one.name in marking:
            marking[one.name] = _marking(using, one.name, marking[one.name])
    plain = [dataclasses.replace(one, once=False) if one.once else one for one in settings.destinations]
    return dataclasses.replace(settings, destinations=plain), marking


@functools.lru_cache(maxsize=256)
def _marking(using: str, name: str, function: Callable[..., Any]) -> Callable[[Event], None]:
    from relaybox.receive.once_handler import check_done, with_connection
    from relaybox.sinks.handler import is_async

    if is_async(name, function):
        raise ConfigError(f"handler {name!r}: once=True: it is an async function: {PLAIN}")
    called = with_connection(function)

    @functools.wraps(function)
    def marking(event: Event) -> None:
        with transaction.atomic(using=using):
            connection = connection_of(using)
            if _write(connection, functools.partial(mark, key=key_of(name, event))):
                check_done(called(event, connection))

    return marking


def _write(connection: BaseDatabaseWrapper, work: Callable[[Statements], Steps[T]]) -> T:
    if not in_transaction(connection):
        raise NotInTransaction(
            "no transaction is open: the mark would be committed without the work that it records; put both"
            " into `with transaction.atomic():`"
        )
    return run_ours(connection, work(_statements(dialect_of(connection).name)))


@functools.cache
def _statements(dialect: str) -> Statements:
    return inbox_statements(get_tables(), DIALECTS[dialect], "format")


def _take_back(connection: BaseDatabaseWrapper, key: Key, error: BaseException) -> None:
    try:
        _write(connection, functools.partial(forget, key=key))
    except EmitError:
        # The transaction can only be rolled back, which removes the mark.
        return
    except Error as failure:
        note_left(error, key, failure)
