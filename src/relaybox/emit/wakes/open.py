"""Open the wake and the bell that the settings ask for; import PostgreSQL's driver only if needed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from relaybox.core.settings import Settings
from relaybox.emit.wakes.local import Bell, LocalWake, Wake


def open_wake(settings: Settings) -> Wake:
    """Return the wake of a relay's lanes; on PostgreSQL other processes can wake them too."""
    wake: Wake | None = _on_postgres("ListeningWake", settings)
    return LocalWake() if wake is None else wake


def open_bell(settings: Settings) -> Bell:
    """Return the bell of an outbox; on PostgreSQL it reaches the relays of all processes."""
    return Bell(functools.partial(_on_postgres, "Notifier", settings))


def _on_postgres(name: str, settings: Settings) -> Any:
    """Return a new object of this class, or None if it is not wanted or psycopg is not installed."""
    if not (settings.notify and settings.database.startswith("postgresql:")):
        return None
    try:
        postgres = importlib.import_module("relaybox.emit.wakes.postgres")
    except ImportError:
        return None
    return getattr(postgres, name)(settings.database, postgres.channel_name(settings.schema, settings.prefix))
