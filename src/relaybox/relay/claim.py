"""The first step: lease due deliveries."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from uuid import UUID

from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay.crashpoint import reached
from relaybox.relay.rest import Rest
from relaybox.relay.shared import Shared
from relaybox.relay.sizing import BYTES_A_CLAIM, Sizing
from relaybox.stores.store import Claim, DeadLetter, Want

LONG_RUN = 10
"""Rows of one key that a claim takes together if there are many keys: each key adds to its cost."""
LOOK_AT_ALL = 0.5
"""Seconds between claims that look at all due rows, not only at those due since the last claim."""
LATE_COMMITS = timedelta(seconds=10)
"""A claim finds events at once if they are committed within this time after ``emit``."""
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
"""Earlier times count as this one: a row edited by hand may have a time too early to subtract from."""


class Claims:
    """Claims the deliveries of one destination, or ``only`` those with some ids."""

    def __init__(
        self,
        destination: Destination,
        shared: Shared,
        dead_letter: DeadLetter | None,
        only: tuple[UUID, ...] | None,
        rest: Rest,
    ) -> None:
        self._destination = destination
        self._shared = shared
        self._dead_letter = dead_letter
        self._only = only
        self._rest = rest
        self.sizing = Sizing(destination)
        self.raises = False
        """True if an error of the store is raised, not only reported."""
        self.refused = False
        """True if the store refused the last claim."""
        self.expects = False
        """True if the next claim will most likely get something."""
        self._since: datetime | None = None
        """The time since which due rows are likely; None if unknown."""
        self._looked_at_all = -math.inf

    async def next(self) -> tuple[Claim, float]:
        """Lease rows due since about the last claim; if there are none, and now and then, any due rows."""
        now, since, sizing = self._shared.clock.now(), self._since, self.sizing
        if self._destination.ordered or now - self._looked_at_all > LOOK_AT_ALL:
            since = None
        explain = self.raises or not self.expects
        # If the rows are too large for this claim, the second one finds them.
        light = since is not None and sizing.light
        claim, until = await self.claim(
            sizing.rows, suspects=False, explain=explain, since=since, light=light
        )
        if since is not None and not claim.deliveries and not self.refused:
            since = None
            claim, until = await self.claim(sizing.rows, suspects=False)
            if light and claim.deliveries:
                sizing.doubt_light()
        if since is None:
            self._looked_at_all = now
        self.expects = bool(claim.deliveries)
        if claim.deliveries:
            self._since = max(claim.deliveries[0].created_at, EARLIEST) - LATE_COMMITS
        return claim, until

    async def claim(
        self,
        limit: int,
        *,
        probe: bool = False,
        suspects: bool = True,
        explain: bool = True,
        since: datetime | None = None,
        light: bool = False,
    ) -> tuple[Claim, float]:
        """Lease rows; return the claim, and the time until which its leases hold for certain."""
        destination, shared = self._destination, self._shared
        want = Want(
            destination.name,
            shared.owner,
            limit,
            destination.lease,
            ordered=destination.ordered,
            on_failed=destination.on_failed or "skip",
            dead_letter=self._dead_letter,
            probe=probe,
            suspects=suspects,
            only=self._only,
            # A probe looks at as many events as possible, to find one that is unlikely to fail.
            spread=None if probe else max(limit // LONG_RUN, min(limit, destination.concurrency)),
            run=None if probe else self.sizing.run,
            explain=explain,
            since=since,
            light=light,
            bytes=BYTES_A_CLAIM,
        )
        until = shared.clock.now() + destination.lease
        reached("claim")
        try:
            claim = await shared.store.claim(want)
        except StoreError as error:
            if self.raises:
                raise
            shared.observer.trouble(destination.name, "claim", error)
            self.refused = True
            self._rest.after_claim(refused=True)
            return Claim(), until
        reached("claimed")
        self.refused = False
        self._rest.after_claim(refused=False)
        # An empty claim for a probe does not show whether the circuit is still open: do not report it.
        if not probe or claim.deliveries or claim.failed:
            shared.observer.claimed(destination.name, claim)
        return claim, until
