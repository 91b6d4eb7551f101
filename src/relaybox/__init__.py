"""Relaybox, a transactional outbox: events leave exactly when their transaction commits.

The names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaybox.app import Outbox
    from relaybox.config import Destination, Route
    from relaybox.emit.event_source import EventSource
    from relaybox.emit.row import Call
    from relaybox.errors import RelayboxError
    from relaybox.event import Emitted, Event
    from relaybox.inboxes.sql import Inbox
    from relaybox.outcome import Reject, Retry, Unavailable
    from relaybox.schema import make_tables

    __version__: str

__all__ = [
    "Call",
    "Destination",
    "Emitted",
    "Event",
    "EventSource",
    "Inbox",
    "Outbox",
    "Reject",
    "RelayboxError",
    "Retry",
    "Route",
    "Unavailable",
    "__version__",
    "make_tables",
]

_HOMES = {
    "Call": "emit.row",
    "Destination": "config",
    "Emitted": "event",
    "Event": "event",
    "EventSource": "emit.event_source",
    "Inbox": "inboxes.sql",
    "Outbox": "app",
    "Reject": "outcome",
    "RelayboxError": "errors",
    "Retry": "outcome",
    "Route": "config",
    "Unavailable": "outcome",
    "make_tables": "schema",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("relaybox")
    elif name in _HOMES:
        value = getattr(import_module(f"relaybox.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
