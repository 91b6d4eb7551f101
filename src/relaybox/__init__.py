"""Relaybox, a transactional outbox: an event is sent if and only if its transaction commits.

Names load on first use, which keeps the import of the package cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaybox.core.event import Emitted, Event
    from relaybox.core.outcome import Reject, Retry, Unavailable
    from relaybox.core.settings import Destination, Route
    from relaybox.database.schema import make_tables
    from relaybox.emit.event_source import EventSource
    from relaybox.emit.row import Call
    from relaybox.errors import RelayboxError
    from relaybox.outbox import Outbox
    from relaybox.receive.inbox import Inbox

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
    "Destination": "core.settings",
    "Emitted": "core.event",
    "Event": "core.event",
    "EventSource": "emit.event_source",
    "Inbox": "receive.inbox",
    "Outbox": "outbox",
    "Reject": "core.outcome",
    "RelayboxError": "errors",
    "Retry": "core.outcome",
    "Route": "core.settings",
    "Unavailable": "core.outcome",
    "make_tables": "database.schema",
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
