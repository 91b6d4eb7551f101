"""The admin's values as the command and the API show them, in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaybox.stores.ledger import Counts, Place

_NAMES = {"delivered": "completed", "sending": "processing"}
"""What the API calls some of the states."""


def counted(counts: Counts, *states: str) -> str:
    """Return how many are in these states together, with a plus if there may be more."""
    total = sum(getattr(counts, state) for state in states)
    return f"{total:,}{'+' if counts.capped.intersection(states) else ''}"


def counts_document(counts: Counts) -> dict[str, Any]:
    """Return the counts; ``pending`` is all that waits, and ``capped`` names those that may be higher."""
    waiting = {"due": counts.due, "scheduled": counts.scheduled, "parked": counts.parked}
    capped = {_NAMES.get(state, state) for state in counts.capped}
    return {
        "pending": sum(waiting.values()),
        "processing": counts.sending,
        "completed": counts.delivered,
        "failed": counts.failed,
        **waiting,
        "oldest_pending": counts.oldest_pending,
        "oldest_pending_seconds": counts.oldest_seconds,
        "capped": sorted(capped | ({"pending"} if capped & waiting.keys() else set())),
    }


def place_document(place: Place | None) -> dict[str, Any]:
    """Return a destination's pause and circuit; without a row of its own, it has neither."""
    if place is None:
        return {"paused": None, "circuit": {"state": "closed", "until": None, "reason": None}}
    paused = {
        "at": place.paused_at,
        "until": place.paused_until,
        "by": place.paused_by,
        "reason": place.pause_reason,
    }
    circuit = {"state": place.circuit, "until": place.circuit_until, "reason": place.circuit_reason}
    return {"paused": paused if place.paused else None, "circuit": circuit}
