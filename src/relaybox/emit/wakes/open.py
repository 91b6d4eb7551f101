"""Open the wake and the bell that the settings ask for; import PostgreSQL's driver only if needed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from relaybox.core.settings import Settings
from relaybox.emit.wakes.local import Bell, LocalWake
from relaybox.emit.wakes.wake import Caller, Wake


def open_wake(settings: Settings) -> Wake:
    """Return the wake of a relay's lanes; on PostgreSQL other processes can wake them too."""
    if (postgres := _postgres(settings)) is None:
        return LocalWake()
    channel = postgres.channel_name(settings.schema, settings.prefix)
    wake: Wake = postgres.ListeningWake(settings.database, channel)
    return wake


def open_bell(settings: Settings) -> Bell:
    """Return the bell of an outbox; on PostgreSQL it reaches the relays of all processes."""
    return Bell(_LateNotifier(settings) if _wanted(settings) else None)


class _LateNotifier:
    """A ``Caller`` made on its first call: code that only reads an outbox needs no driver."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @functools.cached_property
    def _notifier(self) -> Caller | None:
        if (postgres := _postgres(self._settings)) is None:
            return None
        channel = postgres.channel_name(self._settings.schema, self._settings.prefix)
        notifier: Caller = postgres.Notifier(self._settings.database, channel)
        return notifier

    def call(self, destinations: Iterable[str]) -> None:
        if self._notifier is not None:
            self._notifier.call(destinations)

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.close()


def _wanted(settings: Settings) -> bool:
    return settings.notify and settings.database.startswith("postgresql:")


def _postgres(settings: Settings) -> Any:
    """Return the module, or None if it is not wanted or psycopg is not installed."""
    if not _wanted(settings):
        return None
    try:
        return importlib.import_module("relaybox.emit.wakes.postgres")
    except ImportError:
        return None
