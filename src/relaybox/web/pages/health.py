"""How a destination is, in one word, its shape and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from relaybox.core.settings import Destination
from relaybox.operate.admin import DestinationStats, Stats
from relaybox.operate.why import at
from relaybox.stores.ledger import Counts, Place
from relaybox.web import show

Mood: TypeAlias = Literal["good", "warn", "bad", ""]


@dataclass(frozen=True, slots=True)
class Health:
    """``word`` names the shape, ``text`` stands by it, ``note`` says more; ``held``: it can be resumed."""

    word: str
    text: str
    mood: Mood
    note: str = ""
    held: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A destination as pages list it."""

    name: str
    configured: bool
    handed_over: bool
    counts: Counts
    health: Health
    sink: str = ""


def row(one: DestinationStats, configured: Destination | None) -> Row:
    """A destination with its health and where it leads."""
    sink = "" if configured is None else show.place(configured.sink)
    return Row(one.name, one.configured, one.handed_over, one.counts, health(one), sink)


def rows(stats: Stats, configured: dict[str, Destination]) -> list[Row]:
    """Every destination, those in trouble first."""
    order: dict[Mood, int] = {"bad": 0, "warn": 1, "": 2, "good": 2}
    every = [row(one, configured.get(one.name)) for one in stats.destinations]
    return sorted(every, key=lambda one: (order[one.health.mood], one.name))


def health(one: DestinationStats) -> Health:
    """What ``why`` would name first."""
    place = one.place
    if place is not None and place.paused:
        return _paused(place)
    if place is not None and place.circuit != "closed":
        return _circuit(place)
    if one.handed_over:
        return Health("handed-over", "Debezium’s", "", "Debezium reads it from the database’s log.")
    if not one.name:
        return Health("unrouted", "unrouted", "warn", "No route takes these events: add one.")
    if not one.configured:
        return Health("unknown", "not configured", "warn", "No destination of this name is configured here.")
    if one.counts.failed:
        failed = show.counted(one.counts, "failed")
        return Health("failing", "has failures", "warn", f"It delivers, but {failed} failed for good.")
    if one.counts.retrying:
        return Health("retrying", "retrying", "", f"What is tried again next: {one.counts.retrying}")
    return Health("healthy", "healthy", "good", "Nothing holds it up.")


def _paused(place: Place) -> Health:
    until = "until somebody resumes it" if place.paused_until is None else f"until {at(place.paused_until)}"
    reason = place.pause_reason or "no reason given"
    note = f"By {place.paused_by}, {until}: {reason}"
    return Health("paused", "paused", "warn", note, held=True, paused=True)


def _circuit(place: Place) -> Health:
    reason = place.circuit_reason or "no reason given"
    if place.circuit == "half_open":
        return Health(
            "circuit-half-open", "circuit half-open", "warn", f"A probe is on its way. {reason}", held=True
        )
    probe = "" if place.circuit_until is None else f" The next probe comes at {at(place.circuit_until)}."
    return Health("circuit-open", "circuit open", "bad", f"{reason}.{probe}", held=True)
