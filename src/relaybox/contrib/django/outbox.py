"""The core's ``Outbox`` of a Django project: for relays and commands, which have connections of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from relaybox.app import Outbox
from relaybox.config import Settings
from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.databases import url_of
from relaybox.contrib.django.dispatch import rings
from relaybox.contrib.django.handlers import with_connections
from relaybox.contrib.django.inbox import in_atomic
from relaybox.contrib.django.signals import ThreadedSignals
from relaybox.observe import Observer
from relaybox.relay.relay import Relay


class ProjectOutbox(Outbox):
    """An outbox whose relays send Django's signals."""

    def __init__(self, using: str, **options: Any) -> None:
        super().__init__(**options)
        self.using = using

    def relay(self, *, patience: float = 30.0, observers: Sequence[Observer] = ()) -> Relay:
        """A relay for every destination, as ``Outbox.relay`` says."""
        signals = ThreadedSignals(self.using, patience)
        return super().relay(patience=patience, observers=[*observers, signals])


def get_outbox(using: str = "default") -> Outbox:
    """The outbox in a database of ``DATABASES``, with the project's destinations, routes and handlers."""
    settings, handlers = in_atomic(using, *get_configuration()[:2])
    settings = dataclasses.replace(settings, database=url_of(using), notify=settings.notify and rings())
    return _made(using, settings, tuple(handlers.items()))


@functools.lru_cache(maxsize=16)
def _made(using: str, settings: Settings, handlers: tuple[tuple[str, Callable[..., Any]], ...]) -> Outbox:
    """One for the same settings, because of what it holds to wake relays with."""
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    called = {name: with_connections(function) for name, function in handlers}
    return ProjectOutbox(using, **options, handlers=called)
