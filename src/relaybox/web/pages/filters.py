"""Filters as they stand in URLs and forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from relaybox.stores.ledger import Filter
from relaybox.web import read
from relaybox.web.problems import Problem
from relaybox.web.schemas import Criteria

FIELDS = {
    "status": "State",
    "destination": "Destination",
    "event_type": "Event type",
    "aggregate_type": "Aggregate type",
    "aggregate_id": "Aggregate id",
    "ordering_key": "Ordering key",
    "event_id": "Event id",
    "since": "Emitted since",
    "until": "Emitted before",
    "error": "Error holds",
    "fingerprint": "Group of failures",
}
"""The parameters of a filter, and what people call them."""


class Wrong(ValueError):
    """A parameter that cannot be meant so; the message says which, and what to write."""


def chosen(given: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a filter that are not empty; forms send the others too."""
    texts = ((name, str(given.get(name, "")).strip()) for name in FIELDS)
    return {name: text for name, text in texts if text}


def filter_of(given: Mapping[str, str]) -> Filter:
    """The filter; raises ``Wrong``."""
    try:
        return read.filter_of(msgspec.convert(given, Criteria, strict=False))
    except msgspec.ValidationError as error:
        what, _, name = str(error).rpartition(" - at `$.")
        raise Wrong(f"{FIELDS.get(name.rstrip('`'), 'Filter')}: {what or error}.") from None
    except Problem as error:
        raise Wrong(error.detail) from None


def cursor_of(text: str | None) -> UUID | None:
    """Where a list goes on; raises ``Wrong``."""
    if not text:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise Wrong("The address names no place in the list; begin with the newest again.") from None
