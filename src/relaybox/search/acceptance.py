"""What a backfill must know of its destination: whether it takes the events, and reads documents anew."""

from __future__ import annotations

from relaybox.core.outcome import Reject
from relaybox.core.schemes import SEARCH_ENGINES
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.search.change import Changes, search_address


def check_target(destination: Destination, event_type: str) -> None:
    """Raise where a search destination would refuse, or ignore, events of this type."""
    changes = changes_of(destination)
    if changes is None:
        return
    try:
        action = changes.action_of(event_type)
    except Reject as refused:
        raise ConfigError(f"destination {destination.name!r}: {refused}") from None
    finally:
        changes.close()
    if action != "index":
        fix = "choose another with event_type, or change the option actions"
        raise ConfigError(
            f"destination {destination.name!r}: for events of the type {event_type!r} it does {action}; {fix}"
        )


def rereads(destination: Destination) -> bool:
    """Whether the destination asks for the newest state of a document, whatever the event says."""
    changes = changes_of(destination)
    if changes is None:
        return False
    changes.close()
    return changes.reread


def changes_of(destination: Destination) -> Changes | None:
    """What a search destination makes of events; None of another destination."""
    if destination.scheme not in SEARCH_ENGINES:
        return None
    return Changes(destination, search_address(destination).options)
