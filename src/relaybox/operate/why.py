"""Explain why a delivery is where it is: one reason, in one sentence."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, TypeAlias
from uuid import UUID

from relaybox.core.commands import Program, command
from relaybox.core.text import at, plural, stated
from relaybox.stores.ledger import DestinationState, Entry, Relay, State

SILENT = timedelta(seconds=15)
"""A relay that was not seen for this long counts as gone; it reports every two seconds."""

Kind: TypeAlias = Literal[
    "delivered", "failed", "discarded", "sending", "paused", "circuit_open", "circuit_half_open", "unrouted",
    "unknown_destination", "unknown_status", "parked", "backing_off", "scheduled", "lease_expired", "due",
    "handed_over", "not_relayed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a delivery is where it is, ``until`` when, and why the event it waits ``behind`` is there."""

    entry: Entry
    kind: Kind
    text: str
    until: datetime | None = None
    behind: Reason | None = None


def explain(
    entry: Entry,
    places: Mapping[str, DestinationState],
    configured: Collection[str],
    relays: Sequence[Relay],
    head: Entry | None = None,
    shared: Collection[UUID] = (),
    handed_over: Collection[str] = (),
    shadowed: Collection[UUID] = (),
    timeouts: Mapping[str, float] = {},
) -> Reason:
    """Return the first reason that applies: final, sending, destination held up, behind another, its own.

    ``head`` is the first open row of its key, if ordered. ``shared`` are events with several deliveries,
    ``handed_over`` Debezium's destinations, ``shadowed`` rows that were not sent, ``timeouts`` in seconds.
    """
    if entry.destination in handed_over and (entry.status == "pending" or not entry.attempts):
        return _handed_over(entry)
    if entry.id in shadowed:
        text = f"was delivered in shadow at {at(entry.delivered_at)}: nothing was sent"
        return Reason(entry, "delivered", text)
    if entry.status != "pending":
        return _final(entry, shared)
    if entry.state is State.SENDING:
        return _sending(entry, timeouts.get(entry.destination))
    if (held := _held(entry, places.get(entry.destination), configured)) is not None:
        later = f"; it is not due before {at(entry.next_attempt_at)} either"
        return replace(held, text=held.text + later) if entry.state is State.SCHEDULED else held
    if head is not None and head.id != entry.id:
        behind = explain(head, places, configured, relays, shared=shared, timeouts=timeouts)
        text = f"waits behind event {head.event_id} of its key {entry.ordering_key!r}, which {behind.text}"
        return Reason(entry, "parked", text, behind=behind)
    if entry.state is State.PARKED:
        text = f"is the next of its key {entry.ordering_key!r} and will be made due by a relay's next sweep"
        return Reason(entry, "parked", text)
    if entry.state is State.SCHEDULED:
        return _waiting(entry)
    return _due(entry, relays)


def advice(entry: Entry, *, shared: bool) -> str:
    """Return the commands for a failed delivery; ``shared``: exclude other deliveries of its event."""
    which = f"{entry.id} --destination {shlex.quote(entry.destination)}" if shared else str(entry.id)
    return f"{command(f'retry {which}')} or {command(f'discard {which}')}"


def _handed_over(entry: Entry) -> Reason:
    """Explain a row of a Debezium destination that no relay delivered."""
    if entry.status == "pending":
        sees = f"destination {entry.destination!r} is Debezium's, which sees only what is emitted for it"
        fix = f"give it to another: {command(f'move {entry.destination} NAME')}"
        return Reason(entry, "not_relayed", f"waits in vain: {sees}; {fix}")
    handed = f"was handed to Debezium's reader of the log at {at(entry.delivered_at)}"
    known = "it was written to the WAL with its transaction, and Relaybox does not know when it was read"
    return Reason(entry, "handed_over", f"{handed}: {known}")


def _final(entry: Entry, shared: Collection[UUID]) -> Reason:
    crashes = f"; its relay died or was stopped {plural(entry.crashes, 'time')}" if entry.crashes else ""
    if entry.status == "delivered":
        delivered = f"was delivered at {at(entry.delivered_at)}"
        return Reason(entry, "delivered", f"{delivered}, {plural(entry.attempts, 'attempt')} in all{crashes}")
    if entry.status == "discarded":
        return Reason(entry, "discarded", f"was discarded by an operator at {at(entry.updated_at)}")
    if entry.state is State.UNKNOWN:
        text = f"has the status {entry.status!r}, which this version does not know and leaves alone"
        return Reason(entry, "unknown_status", text)
    failed = f"failed at {at(entry.updated_at)} after {plural(entry.attempts, 'attempt')}{crashes}"
    fix = advice(entry, shared=entry.event_id in shared)
    return Reason(entry, "failed", f"{failed}: {last_error(entry)}; {fix}")


def _sending(entry: Entry, timeout: float | None) -> Reason:
    end = at(entry.leased_until)
    text = f"is being sent by {entry.lease_owner}, {_attempt(entry)}; its lease runs until {end}"
    claimed = entry.last_attempt_at
    if timeout is not None and claimed is not None and (entry.seen_at - claimed).total_seconds() > timeout:
        text += f"; it was claimed at {at(claimed)}, and {overdue(timeout)}"
    return Reason(entry, "sending", text, entry.leased_until)


def overdue(timeout: float) -> str:
    """Explain a delivery that has been with a function for longer than its timeout."""
    return f"its function is over its time of {timeout:g} s, or it waits in the relay behind others"


def _held(entry: Entry, place: DestinationState | None, configured: Collection[str]) -> Reason | None:
    name = entry.destination
    if place is not None and place.paused:
        paused = f"paused by {place.paused_by} at {at(place.paused_at)}"
        about = f"({stated(place.pause_reason)}) until {pause_end(place)}"
        text = f"waits because destination {name!r} was {paused} {about}; {command(f'resume {name}')}"
        return Reason(entry, "paused", text, place.paused_until)
    if place is not None and place.circuit != "closed":
        return _circuit(entry, place)
    if not name:
        fix = "add a route, or " + command("move '' NAME")
        return Reason(entry, "unrouted", f"has no destination: no route takes its event type; {fix}")
    if name not in configured:
        fix = f"configure it, or give its events to another: {command(f'move {name} NAME')}"
        text = f"waits because no destination is called {name!r}; {fix}"
        return Reason(entry, "unknown_destination", text)
    return None


def pause_end(place: DestinationState) -> str:
    """Say until when a pause lasts."""
    return "somebody resumes it" if place.paused_until is None else at(place.paused_until)


def _circuit(entry: Entry, place: DestinationState) -> Reason:
    reason = stated(place.circuit_reason)
    waits = f"waits because the circuit of destination {place.name!r} is"
    if place.circuit == "half_open":
        text = f"{waits} half-open ({reason}): a probe is on its way"
        return Reason(entry, "circuit_half_open", text, place.circuit_until)
    over = place.circuit_until is not None and place.circuit_until <= place.seen_at
    when = "is due now" if over else f"comes at {at(place.circuit_until)}"
    resume = command(f"resume {place.name}")
    text = f"{waits} open ({reason}): the next probe {when}; {resume} closes it now"
    return Reason(entry, "circuit_open", text, place.circuit_until)


def _waiting(entry: Entry) -> Reason:
    if not entry.backing_off:
        text = f"was emitted for later and is due at {at(entry.next_attempt_at)}"
        return Reason(entry, "scheduled", text, entry.next_attempt_at)
    # An attempt that found the destination unavailable is given back.
    unavailable = "because its destination was unavailable, which is not counted as an attempt"
    cause = f"after {_attempt(entry)}, which failed" if entry.attempts else unavailable
    text = f"backs off {cause}: {last_error(entry)}; the next one is at {at(entry.next_attempt_at)}"
    return Reason(entry, "backing_off", text, entry.next_attempt_at)


def _due(entry: Entry, relays: Sequence[Relay]) -> Reason:
    relay = _relay(relays)
    if entry.leased_until is not None:
        held = f"was held by {entry.lease_owner} until its lease ran out at {at(entry.leased_until)}"
        again = f"it is claimed again{', apart from others,' if entry.crashes else ''} {relay}"
        return Reason(entry, "lease_expired", f"{held} with no answer: {again}")
    interrupted = f"because its relay died or was stopped {entry.crashes} times"
    apart = f" apart from others, {interrupted}," if entry.crashes > 1 else ""
    return Reason(entry, "due", f"is due since {at(entry.next_attempt_at)} and is claimed{apart} {relay}")


def _relay(relays: Sequence[Relay]) -> str:
    if any(map(is_alive, relays)):
        return "by the next relay that has room"
    if deliverer := Program.deliverer():
        return f"by {deliverer}"
    seen = f"the last was seen at {at(relays[0].last_seen_at)}" if relays else "none runs now"
    return f"when a relay runs, but {seen}; {command('relay')}"


def _attempt(entry: Entry) -> str:
    return f"attempt {entry.attempts} of {entry.max_attempts}"


def last_error(entry: Entry) -> str:
    """Return the error of the last attempt on one line."""
    return " ".join((entry.error_message or "no error on record").split())


def is_leader(relay: Relay) -> bool:
    """True if the relay did the upkeep when it was seen."""
    return relay.leads_until is not None and relay.leads_until > relay.seen_at


def is_alive(relay: Relay) -> bool:
    """True if the relay was seen recently."""
    return relay.seen_at - relay.last_seen_at < SILENT
