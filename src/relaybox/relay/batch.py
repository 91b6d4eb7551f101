"""The deliveries that a lane has in flight, as one batch per claim.

A row is identified by its position: looking up a number is cheaper than looking up an id.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from uuid import UUID

from relaybox.core.event import Delivery

LIGHT = 512
"""Bytes per row. A lighter batch counts in full until all of it is settled: subtracting each row is slow."""


class Lease:
    """The lease of one claim. By the relay's own clock it holds until ``until`` for certain.

    ``behind`` has an earlier end, by position, for each row that could not be extended with the others.
    """

    def __init__(self, token: UUID, began: float, until: float) -> None:
        self.token = token
        self.began = began
        self.until = until
        self.behind: dict[int, float] = {}

    def ends_before(self, moment: float) -> bool:
        """True if it ends before that moment, at least for one row."""
        return min((self.until, *self.behind.values())) < moment

    def extend(self, until: float, except_for: Collection[int]) -> None:
        """Record that it holds until then, except for some positions."""
        self.behind = {position: self.behind.get(position, self.until) for position in except_for}
        self.until = until


class Batch:
    """The deliveries of one claim until each is settled. It flows through all steps of a lane."""

    def __init__(
        self, deliveries: Sequence[Delivery], until: float, began: float = 0.0, *, probing: bool = False
    ) -> None:
        self.deliveries = deliveries
        self.lease = Lease(deliveries[0].lease_token, began, until)
        self.probing = probing
        self.begun: set[int] = set()
        self.answered: set[int] = set()
        self.tried = False
        self.unsettled = {delivery.position: delivery for delivery in deliveries}
        self.sending: asyncio.Task[None]
        """The task that sends the batch. It ends when every delivery has an answer."""
        self.done = asyncio.Event()
        self._of_keys: defaultdict[str | None, list[Delivery]] | None = None
        """The deliveries of each key; built when the first of them does not arrive."""
        self.bytes = size(deliveries)
        self.heavy = self.bytes > LIGHT * len(deliveries)

    def after(self, delivery: Delivery) -> list[Delivery]:
        """Return the deliveries behind this one in its key that are neither answered nor lost.

        Later calls for the same key return nothing: a sink may report many of its deliveries in a row.
        """
        if self._of_keys is None:
            self._of_keys = defaultdict(list)
            for one in self.deliveries:
                self._of_keys[one.ordering_key].append(one)
        return [
            one
            for one in self._of_keys.pop(delivery.ordering_key, ())
            if one.position > delivery.position
            and one.position in self.unsettled
            and one.position not in self.answered
        ]

    def unanswered(self) -> list[Delivery]:
        """Return the deliveries that are neither answered nor lost."""
        return [delivery for at, delivery in self.unsettled.items() if at not in self.answered]

    def unbegun(self) -> list[Delivery]:
        """Return the deliveries that were not sent."""
        return [delivery for delivery in self.unanswered() if delivery.position not in self.begun]


def size(deliveries: Iterable[Delivery]) -> int:
    """Return the size of all payloads and headers: bytes of binary data, characters of text."""
    return sum([len(d.payload or d.payload_data or "") + len(d.headers) for d in deliveries])


class InFlight:
    """The batches that a lane has in flight, with their totals."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._batches: list[Batch] = []
        self._of: dict[int, Batch] = {}
        self._changed = changed
        self._news = asyncio.Event()
        self.tasks: asyncio.TaskGroup
        """Where sends run, as long as the lane runs."""
        self.sends: set[asyncio.Task[None]] = set()
        self.answered = 0
        """Answers since the last claim."""
        self.returning: frozenset[tuple[int, UUID]] = frozenset()
        """Position and token of deliveries that are being given back, and so must not begin."""

    def add(self, batch: Batch) -> None:
        """Add a batch, and drop its rows from older batches: their leases were lost to this claim."""
        self.drop([self._of[at].unsettled[at] for at in self._of.keys() & batch.unsettled.keys()])
        self._batches.append(batch)
        self._of.update(dict.fromkeys(batch.unsettled, batch))

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Remove deliveries that are settled or lost, unless the row is in flight under another lease."""
        before = len(self._of)
        for delivery in deliveries:
            position, token = delivery.position, delivery.lease_token
            batch = self._of.get(position)
            # Comparing ids is slow, and nearly always both are the same object.
            if batch is None or (batch.lease.token is not token and batch.lease.token != token):
                continue
            del self._of[position]
            del batch.unsettled[position]
            if batch.heavy:
                batch.bytes -= size((delivery,))
            if not batch.unsettled:
                self._batches.remove(batch)
                batch.done.set()
        if len(self._of) < before:
            self.notify()
            self._changed()

    def notify(self) -> None:
        """End all calls of ``until_changed``."""
        self._news.set()

    async def until_changed(self) -> None:
        """Wait until deliveries were dropped, or until ``notify``."""
        await self._news.wait()
        self._news.clear()

    def unbegun(self) -> list[Delivery]:
        """Return the deliveries that were not sent."""
        return [delivery for batch in self._batches for delivery in batch.unbegun()]

    def has_older(self, moment: datetime) -> bool:
        """True if a delivery that was emitted at or before ``moment`` is in flight."""
        return any(
            delivery.created_at <= moment for batch in self._batches for delivery in batch.unsettled.values()
        )

    def sending(self) -> int:
        """Return how many deliveries are being sent."""
        return sum(len((batch.begun - batch.answered) & batch.unsettled.keys()) for batch in self._batches)

    def behind(self, since: float) -> list[Delivery]:
        """Return deliveries that have waited at least since ``since`` behind one of their key being sent.

        Return nothing if the first of any key waits too: for a free place, or for the rate limit.
        """
        if not self._batches or self._batches[0].lease.began > since:
            return []
        keys: set[str | None] = set()
        behind = []
        # Suspects are left out: they wait for other suspects.
        for batch in [batch for batch in self._batches if not batch.deliveries[0].suspect]:
            for delivery in batch.unanswered():
                begun, key = delivery.position in batch.begun, delivery.ordering_key
                if not begun and key not in keys:
                    return []
                if not begun and batch.lease.began <= since:
                    behind.append(delivery)
                if key is not None:
                    keys.add(key)
        return behind

    def forget(self) -> None:
        """Drop all batches without settling them. Relays claim the rows again when the leases expire."""
        for batch in self._batches:
            batch.done.set()
        self._batches.clear()
        self._of.clear()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Batch]:
        return iter(list(self._batches))

    @property
    def bytes(self) -> int:
        """Return the size of all unsettled deliveries."""
        return sum(batch.bytes for batch in self._batches)
