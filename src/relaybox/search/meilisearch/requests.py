"""The requests that write to Meilisearch, and what it never takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import json

from relaybox.core.outcome import Reject, Unavailable
from relaybox.errors import shorten
from relaybox.search.engine import Change
from relaybox.sinks.sink import Answer

LARGEST_BODY = 32 * 1024 * 1024
"""Bytes of a request; a server takes 100 MiB unless it is told otherwise."""
LONGEST_ID = 511

_NAME = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)


class Item(NamedTuple):
    """One change of a write: its place there, and how it stands in a request."""

    at: int
    id: str
    written: bytes


class WriteRequest(NamedTuple):
    """Documents to add, or ids to delete."""

    deletes: bool
    items: Sequence[Item]

    @property
    def body(self) -> bytes:
        """Lines of JSON, or an array."""
        written = [item.written for item in self.items]
        return b"[%b]" % b",".join(written) if self.deletes else b"\n".join(written)

    def without(self, guilty: Sequence[Item]) -> WriteRequest:
        """The same but for these."""
        return WriteRequest(self.deletes, [item for item in self.items if item not in guilty])

    def halves(self) -> list[WriteRequest]:
        """Two of them, none of them empty."""
        middle = len(self.items) // 2
        return [
            WriteRequest(self.deletes, part) for part in (self.items[:middle], self.items[middle:]) if part
        ]

    def fitting(self) -> list[WriteRequest]:
        """As many of them as it takes for none to be too large."""
        if len(self.items) > 1 and sum(len(item.written) + 1 for item in self.items) > LARGEST_BODY:
            return [fitting for half in self.halves() for fitting in half.fitting()]
        return [self] if self.items else []


def requests_of(changes: Sequence[Change], answers: dict[int, Answer]) -> list[WriteRequest]:
    """The requests that it takes; what no server takes is answered at once."""
    adds: list[Item] = []
    deletes: list[Item] = []
    for at, change in enumerate(changes):
        if not is_id(change.id):
            answers[at] = Reject(
                f"{shorten(change.id)} is no id for Meilisearch: it takes letters a-z A-Z, digits, - and _, "
                f"at most {LONGEST_ID} of them"
            )
        elif change.document is None:
            deletes.append(Item(at, change.id, json.encode(change.id)))
        else:
            try:
                adds.append(Item(at, change.id, json.encode(dict(change.document))))
            except (TypeError, ValueError, RecursionError) as error:
                answers[at] = Reject(f"the document is no JSON: {error}")
    return [*WriteRequest(False, adds).fitting(), *WriteRequest(True, deletes).fitting()]


def is_id(text: str) -> bool:
    """Whether a document can have it."""
    return len(text) <= LONGEST_ID and _NAME.fullmatch(text) is not None


def path_of(index: str) -> str:
    """Where an index is found; raises ``Reject`` where none can have the name."""
    if not _NAME.fullmatch(index):
        raise Reject(
            f"{shorten(index)} is no index for Meilisearch: it takes letters a-z A-Z, digits, - and _"
        )
    return f"/indexes/{index}"


def check_copied(like: str, settings: Mapping[str, Any]) -> None:
    """Raises ``Unavailable`` where settings cannot be copied: Meilisearch does not show an embedder's key."""
    embedders: Mapping[str, Any] = settings.get("embedders") or {}
    for name, embedder in embedders.items():
        if embedder.get("apiKey"):
            raise Unavailable(
                f"the settings of the index {like!r} cannot be copied: its embedder {name!r} has an apiKey, "
                "which Meilisearch does not tell"
            )
