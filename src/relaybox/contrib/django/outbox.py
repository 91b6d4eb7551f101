"""The project's outbox: ``get_outbox`` opens its own connections, ``ask`` uses Django's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import url_of
from relaybox.contrib.django.handlers import with_connections
from relaybox.contrib.django.inbox import in_atomic
from relaybox.contrib.django.signals import ThreadedSignals
from relaybox.contrib.django.store import enter, open_store
from relaybox.core.settings import Settings
from relaybox.operate.admin import Admin
from relaybox.outbox import Outbox
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.stores.sql.ledger import SqlLedger

T = TypeVar("T")


class ProjectOutbox(Outbox):
    """An outbox with relays that send Django's signals."""

    def __init__(self, using: str, **options: Any) -> None:
        super().__init__(**options)
        self.using = using

    def relay(self, *, patience: float = 30.0, observers: Sequence[Observer] = ()) -> Relay:
        """Return a relay for every destination, as ``Outbox.relay`` does."""
        signals = ThreadedSignals(self.using, patience)
        return super().relay(patience=patience, observers=[*observers, signals])


def get_outbox(using: str = "default") -> Outbox:
    """Return the outbox of an alias, with the project's destinations, routes and handlers."""
    settings, handlers = in_atomic(using, *get_configuration()[:2])
    notify = settings.notify and get_settings().rings
    settings = dataclasses.replace(settings, database=url_of(using), notify=notify)
    return _made(using, settings, tuple(handlers.items()))


@functools.lru_cache(maxsize=16)
def _made(using: str, settings: Settings, handlers: tuple[tuple[str, Callable[..., Any]], ...]) -> Outbox:
    """Return the same outbox for the same settings: it holds connections for waking relays."""
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    called = {name: with_connections(function) for name, function in handlers}
    return ProjectOutbox(using, **options, handlers=called)


def ask(using: str, actor: str, work: Callable[[Admin], Awaitable[T]], *, interruptibly: bool = False) -> T:
    """Run the work with the admin service on Django's connection; ``interruptibly`` lets Ctrl-C stop it."""
    # Opening the store may query the server's kind, which must happen in this thread.
    ledger = SqlLedger(open_store(using))

    async def asked() -> T:
        return await work(Admin(ledger, get_configuration().settings.destinations, actor))

    return enter(asked, interruptibly=interruptibly)
