"""What a test expects of an event, how one differs from it, and how that is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypedDict

import msgspec

from relaybox.core.routing import Routes
from relaybox.core.settings import Route
from relaybox.errors import PayloadError, shorten
from relaybox.sinks.sink import describe
from relaybox.testing.emitted import EmittedEvent
from relaybox.wire.codec import Limits, encode_payload

SHOWN = 20
"""The most events that a message lists."""

NEAREST = 3
EXCERPT = 70


class Wanted(TypedDict, total=False):
    """What may be said of an event, beside its type. ``payload`` and ``headers`` need only be contained in
    the event's own; a function is given them and says whether they are right.
    """

    aggregate_type: str
    aggregate_id: Any
    payload: Any
    headers: Mapping[str, Any] | Callable[[Any], Any]
    destination: str
    idempotency_key: str


@dataclass(frozen=True)
class Expectation:
    """What is looked for; the type is a pattern, as in a route."""

    event_type: str
    aggregate_type: str | None = None
    aggregate_id: Any = None
    payload: Any | EllipsisType = ...
    headers: Mapping[str, Any] | Callable[[Any], Any] | EllipsisType = ...
    destination: str | None = None
    idempotency_key: str | None = None

    @property
    def said(self) -> dict[str, Any]:
        """What is expected beside the type."""
        given = {name: value for name, value in vars(self).items() if value is not None and value is not ...}
        del given["event_type"]
        return given

    def __str__(self) -> str:
        said = (f"{name}={shorten(value)}" for name, value in self.said.items())
        return ", ".join([self.event_type, *said])

    def differences(self, event: EmittedEvent) -> list[str]:
        """Say what is not as expected; nothing where the event is the one."""
        found = []
        if not Routes([Route(self.event_type, to="test")]).destinations(event.type):
            found.append(f"its type is {event.type!r}, not {self.event_type!r}")
        aggregate_id = None if self.aggregate_id is None else str(self.aggregate_id)
        for name, wanted in (
            ("aggregate_type", self.aggregate_type),
            ("aggregate_id", aggregate_id),
            ("idempotency_key", self.idempotency_key),
        ):
            if wanted is not None and wanted != (seen := getattr(event, name)):
                found.append(f"its {name} is {shorten(seen)}, not {shorten(wanted)}")
        if self.destination is not None and self.destination not in event.statuses:
            found.append(f"it goes to {', '.join(event.destinations)}, not to {self.destination}")
        found += _content("payload", self.payload, event.payload)
        found += _content("headers", self.headers, event.headers)
        return found


def _content(name: str, wanted: Any, seen: Any) -> Iterator[str]:
    if wanted is ...:
        return
    if not callable(wanted) or isinstance(wanted, type):
        yield from missing(wanted, seen, name)
        return
    try:
        right = wanted(seen)
    except Exception as error:
        yield f"the function for its {name} raised {describe(error)}"
    else:
        if not right:
            yield f"the function for its {name} says no to {shorten(seen)}"


def missing(wanted: Any, seen: Any, path: str) -> Iterator[str]:
    """What of ``wanted`` is not in ``seen``: objects may hold more, everything else is equal.

    Values are compared as they are, and as they are stored: ``Decimal("1.5")`` is ``"1.5"``.
    """
    if isinstance(wanted, Mapping) and isinstance(seen, Mapping):
        for key, value in wanted.items():
            name = _name(key)
            if name in seen:
                yield from missing(value, seen[name], f"{path}[{name!r}]")
            else:
                yield f"{path}[{name!r}] is missing"
    elif _is_array(wanted) and isinstance(seen, list):
        if len(wanted) != len(seen):
            yield f"{path} has {len(seen)} item{'' if len(seen) == 1 else 's'}, not {len(wanted)}"
        for index, (value, other) in enumerate(zip(wanted, seen, strict=False)):
            yield from missing(value, other, f"{path}[{index}]")
    elif not _equal(wanted, seen):
        stored = _stored(wanted)
        if isinstance(stored, Mapping | list) and not isinstance(wanted, Mapping | list | tuple):
            yield from missing(stored, seen, path)
        elif not _equal(stored, seen):
            yield f"{path} is {shorten(seen)}, not {shorten(wanted)}"


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _equal(wanted: Any, seen: Any) -> bool:
    # In JSON true is not 1, as it is in Python.
    same_kind = isinstance(wanted, bool) == isinstance(seen, bool) or not isinstance(wanted, bool | int)
    return same_kind and bool(wanted == seen)


def _name(key: Any) -> str:
    """A key as it is stored."""
    return key if isinstance(key, str) else str(next(iter(_stored({key: None})), key))


def _stored(value: Any) -> Any:
    """What a database gives back of a value; one that cannot be stored, such as a matcher, as it is."""
    try:
        text, data, _ = encode_payload(value, Limits())
    except PayloadError:
        return value
    return data if text is None else msgspec.json.decode(text)


def _events(count: int) -> str:
    return f"{count or 'no'} event{'' if count == 1 else 's'}"


def not_found(
    expected: Expectation, events: Sequence[EmittedEvent], found: Sequence[EmittedEvent], count: int | None
) -> str:
    """The message of an ``assert_emitted`` that failed, but for the hints."""
    if found and count is not None:
        return "\n".join([f"{_events(len(found))} of {count} expected: {expected}", *table(found)])
    lines = [f"no event was emitted that is: {expected}", *_near(expected, events)]
    if events:
        lines += [f"emitted since the test began: {_events(len(events))}", *table(events)]
    return "\n".join(lines)


def found_instead(expected: Expectation, found: Sequence[EmittedEvent]) -> str:
    """The message of a ``refute_emitted`` that failed."""
    head = f"{_events(len(found))} emitted that should not be: {expected}"
    return "\n".join([head, *table(found)])


def _near(expected: Expectation, events: Sequence[EmittedEvent]) -> Iterator[str]:
    """The events that differ least; one of another type is near only if nothing else differs."""
    candidates = []
    for event in events:
        differences = expected.differences(event)
        of_type = not any(text.startswith("its type is") for text in differences)
        if of_type or (expected.said and len(differences) == 1):
            candidates.append((event, differences))
    for event, differences in sorted(candidates, key=lambda each: len(each[1]))[:NEAREST]:
        named = f"{event.type} of {event.aggregate_type} {event.aggregate_id}"
        yield f"near: {named}: {'; '.join(differences)}"


def table(events: Sequence[EmittedEvent]) -> list[str]:
    """The events, one a line, in columns."""
    rows = [("event type", "aggregate", "destinations", "payload")]
    for event in events[:SHOWN]:
        aggregate = f"{event.aggregate_type} {event.aggregate_id}"
        rows.append((event.type, aggregate, ", ".join(event.destinations), _excerpt(event.payload)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    more = len(events) - SHOWN
    return [*lines, f"  … and {more} more"] if more > 0 else lines


def _excerpt(payload: Any) -> str:
    text = repr(payload) if isinstance(payload, bytes) else json.dumps(payload, ensure_ascii=False)
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 1]}…"
