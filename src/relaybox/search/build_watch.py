"""Whether a build goes on: its index is still there, its events arrive, and if not, what holds them up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from relaybox.core.commands import command
from relaybox.errors import StoreError
from relaybox.operate.why import is_alive
from relaybox.search.engine import TROUBLE
from relaybox.search.indexes import given_up
from relaybox.search.reindex_operation import ReindexFailed
from relaybox.search.workspace import OutboxRecords, Target
from relaybox.stores.ledger import Entry, Filter

POLL = 0.5
"""Seconds between two looks."""

QUIET = 5.0
"""Seconds without progress after which it is said what is waited for."""

LATELY = 60.0
"""Seconds in which something has to be settled where others are ahead."""

EXPLAINED = 5.0
"""Seconds in which the reason is on record for which a relay has dropped the index."""

NAMED = 3
"""Documents whose troubles are told."""

LOOKED_AT = 50
"""Events that an index of that name has refused, which may have been an earlier one."""

log = logging.getLogger(__name__)
Tell: TypeAlias = Callable[[str], None]


class BuildWatch:
    """Looks after one build; ``target`` is the index that is built."""

    def __init__(
        self, records: OutboxRecords, target: Target, identity: str, patience: float, tell: Tell
    ) -> None:
        self._records = records
        self._target = target
        self._destination = target.destination.name
        self._identity = identity
        self._patience = patience
        self._tell = tell
        self.backlog: int | None = None
        """How many other deliveries of the destination have to become fewer before the build goes on."""
        self._pending = 0
        self._began_at = self._moved_at = self._answered_at = time.monotonic()
        self._told: str | None = None

    async def run(self) -> None:
        """Look again and again; ends only by raising ``ReindexFailed``."""
        while True:
            began = time.monotonic()
            await self.check_index()
            try:
                await self.check_failed()
                await self.pending()
                await self._check_progress()
            except StoreError as error:
                log.warning("the database does not say how the build goes: %s", error)
            # Counting takes its time where much is pending.
            await asyncio.sleep(max(POLL, 5 * (time.monotonic() - began)))

    async def pending(self) -> int:
        """How many events of the build have not arrived."""
        pending = await self._records.undelivered.pending_for(self._destination, self._target.index)
        if pending != self._pending or not (pending or self.backlog):
            self._moved_at = time.monotonic()
        self._pending = pending
        return pending

    async def check_index(self, *, strict: bool = False) -> None:
        """Raises where the index is gone, or is another one. An engine that is away may come back."""
        name = self._target.index
        try:
            present = await self._target.engine.present([name])
        except TROUBLE as error:
            if strict or time.monotonic() - self._answered_at > self._patience:
                raise ReindexFailed(f"the search engine does not answer: {error}") from error
            return
        self._answered_at = time.monotonic()
        if present.get(name) == self._identity:
            return
        # Where a late write has made another of that name, it was dropped all the same.
        because = await self._dropped_because()
        if because or name not in present:
            raise ReindexFailed(f"{name!r} was dropped while it was built{because}")
        raise ReindexFailed(f"{name!r} is no longer the index that this reindex created")

    async def check_failed(self) -> None:
        """Raises where events of the build have failed."""
        failed = await self._records.undelivered.failed_for(self._destination, self._target.index, NAMED)
        if failed:
            reasons = "; ".join(
                f"document {one.document}: {one.error or 'no reason given'}" for one in failed
            )
            raise ReindexFailed(f"{self._target.index!r} cannot be built, because events failed: {reasons}")

    async def _dropped_because(self) -> str:
        """A relay that drops it answers the events in question with the reason, a moment later."""
        beginning = given_up(self._target.index)
        filter = Filter(destination=self._destination, error=beginning)
        give_up = time.monotonic() + EXPLAINED
        while time.monotonic() < give_up:
            page = await self._records.admin.events(filter, limit=LOOKED_AT)
            if own := [one for one in page.entries if self._is_of_this_build(one)]:
                reasons = [(one, str(one.error_message).removeprefix(beginning)) for one in own[:NAMED]]
                told = "; ".join(f"document {one.aggregate_id}: {reason}" for one, reason in reasons)
                return f", because it cannot have all documents: {told}"
            await asyncio.sleep(POLL)
        return ""

    def _is_of_this_build(self, entry: Entry) -> bool:
        ago = (entry.seen_at - entry.updated_at).total_seconds()
        return ago < time.monotonic() - self._began_at

    async def _check_progress(self) -> None:
        silent = time.monotonic() - self._moved_at
        if silent < QUIET:
            self._told = None
            return
        reason = await self._held_up()
        if silent > self._patience:
            if reason is None and await self._settles():
                # What was emitted before is still ahead.
                self._moved_at = time.monotonic()
                return
            why = reason or "a relay is alive, but nothing is delivered"
            raise ReindexFailed(f"no event of the build has arrived for {silent:.0f} s: {why}")
        if reason is not None and reason != self._told:
            self._tell(f"waiting for {self._pending + (self.backlog or 0):,} events: {reason}")
            self._told = reason

    async def _held_up(self) -> str | None:
        """Why nothing arrives, where it can be said; raises where that will stay so."""
        ledger, name = self._records.ledger, self._destination
        if not any(map(is_alive, await ledger.relays())):
            return f"no relay runs: start one with {command('relay')}"
        place = (await ledger.places()).get(name)
        if place is not None and place.paused:
            return f"{name} is paused: {command(f'resume {name}')}"
        if place is not None and place.circuit != "closed":
            return f"the circuit of {name} is open: {place.circuit_reason or 'no reason given'}"
        await self._check_blocked()
        return None

    async def _settles(self) -> bool:
        """Whether anything of the destination was settled lately."""
        flows = await self._records.admin.journal.flows({self._destination: LATELY})
        return flows[self._destination].settles

    async def _check_blocked(self) -> None:
        """Raises where a document's events wait behind one that failed."""
        block = self._target.destination.on_failed == "block"
        waiting = await self._records.undelivered.waiting_for(self._destination, self._target.index, NAMED)
        for row in waiting:
            for entry in await self._records.ledger.find(row.id, exact=True):
                if entry.ordering_key is None:
                    continue
                head = await self._records.ledger.head(self._destination, entry.ordering_key, block=block)
                if head is not None and head.status == "failed":
                    fix = f"see {command(f'why {head.event_id}')}, and retry or discard it"
                    raise ReindexFailed(f"document {row.document} waits behind an event that failed: {fix}")
