"""What one claim got, while it is in flight; and all that a lane has in flight.

Rows are told apart by their position: a number, which is cheaper to look up than an id.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from relaybox.core.event import Delivery

LIGHT = 512
"""Bytes a row up to which a batch counts whole until it is settled: subtracting each row costs too much."""


class Batch:
    """The deliveries of one claim until each is settled.

    ``until`` is the moment, by the relay's own clock, up to which their leases hold for certain; those of
    some may be ``behind``, because they could not be extended with the others: their own, by position.
    """

    def __init__(self, deliveries: Sequence[Delivery], until: float, *, probing: bool = False) -> None:
        self.deliveries = deliveries
        self.until = until
        self.behind: dict[int, float] = {}
        self.probing = probing
        self.token = deliveries[0].lease_token
        self.begun: set[int] = set()
        self.answered: set[int] = set()
        self.tried = False
        self.unsettled = {delivery.position: delivery for delivery in deliveries}
        self.began: float
        """When it was claimed, by the relay's own clock."""
        self.sending: asyncio.Task[None]
        """Ends when each is answered."""
        self.done = asyncio.Event()
        self._of_keys: defaultdict[str | None, list[Delivery]] | None = None
        """The deliveries of each key, once one of them did not arrive."""
        self.bytes = size(deliveries)
        self.heavy = self.bytes > LIGHT * len(deliveries)

    def ends_before(self, moment: float) -> bool:
        """Whether one of its leases does."""
        return min((self.until, *self.behind.values())) < moment

    def extend(self, until: float, except_for: Collection[int]) -> None:
        """Its leases hold up to then, except for those of some positions."""
        self.behind = {position: self.behind.get(position, self.until) for position in except_for}
        self.until = until

    def after(self, delivery: Delivery) -> list[Delivery]:
        """Return what is behind a delivery in its key and neither answered nor lost.

        Once for each key: a sink may report many of them, one after the other.
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
        """What is neither answered nor lost."""
        return [delivery for at, delivery in self.unsettled.items() if at not in self.answered]

    def unbegun(self) -> list[Delivery]:
        """What was not sent."""
        return [delivery for delivery in self.unanswered() if delivery.position not in self.begun]


def size(deliveries: Iterable[Delivery]) -> int:
    """Payloads and headers, in bytes or, of texts, in characters."""
    return sum([len(d.payload or d.payload_data or "") + len(d.headers) for d in deliveries])


class InFlight:
    """The batches of a lane, and what they amount to."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._batches: list[Batch] = []
        self._of: dict[int, Batch] = {}
        self._changed = changed

    def add(self, batch: Batch) -> None:
        """Take it in. What another batch still held of it was lost to this claim."""
        self.drop([self._of[at].unsettled[at] for at in self._of.keys() & batch.unsettled.keys()])
        self._batches.append(batch)
        self._of.update(dict.fromkeys(batch.unsettled, batch))

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """They are settled, or somebody else's by now. A row may be in flight again under another lease."""
        before = len(self._of)
        for delivery in deliveries:
            position, token = delivery.position, delivery.lease_token
            batch = self._of.get(position)
            # To compare ids takes long, and nearly always they are the same one.
            if batch is None or (batch.token is not token and batch.token != token):
                continue
            del self._of[position]
            del batch.unsettled[position]
            if batch.heavy:
                batch.bytes -= size((delivery,))
            if not batch.unsettled:
                self._batches.remove(batch)
                batch.done.set()
        if len(self._of) < before:
            self._changed()

    def unbegun(self) -> list[Delivery]:
        """What was not sent."""
        return [delivery for batch in self._batches for delivery in batch.unbegun()]

    def sending(self) -> int:
        """Return how many deliveries are being sent."""
        return sum(len((batch.begun - batch.answered) & batch.unsettled.keys()) for batch in self._batches)

    def behind(self, since: float) -> list[Delivery]:
        """Return what has waited ``since`` then, or longer, behind one of its key that is being sent.

        Nothing, where the first of a key has to wait as well: for a place, or for the rate limit.
        """
        if not self._batches or self._batches[0].began > since:
            return []
        keys: set[str | None] = set()
        behind = []
        # Suspects wait for others of their kind.
        for batch in [batch for batch in self._batches if not batch.deliveries[0].suspect]:
            for delivery in batch.unanswered():
                begun, key = delivery.position in batch.begun, delivery.ordering_key
                if not begun and key not in keys:
                    return []
                if not begun and batch.began <= since:
                    behind.append(delivery)
                if key is not None:
                    keys.add(key)
        return behind

    def forget(self) -> None:
        """Leave everything to whoever claims it next."""
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
        """The size of what is unsettled."""
        return sum(batch.bytes for batch in self._batches)
