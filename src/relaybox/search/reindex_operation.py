"""Run as the only reindex of a destination, watch its build, and remove what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from uuid_utils.compat import uuid7

from relaybox.core.commands import command
from relaybox.core.settings import Destination
from relaybox.errors import RelayboxError, StoreError
from relaybox.operate.admin import Named
from relaybox.operate.runner import Runner, is_abandoned
from relaybox.operate.why import is_alive
from relaybox.relay.process import this_process
from relaybox.search.checkpoint import LOOKED_AT
from relaybox.search.engine import TROUBLE, Engine
from relaybox.search.indexes import LOOK, given_up
from relaybox.search.workspace import OutboxRecords, Workspace
from relaybox.stores.journal import STALLED, Operation
from relaybox.stores.ledger import Filter

POLL = 0.5
"""Seconds between checks of a build."""

QUIET = 5.0
"""Seconds without progress before the reason is reported."""

LATELY = 60.0
"""Seconds in which the destination must settle something, if older events are ahead of the build's."""

EXPLAINED = 5.0
"""Seconds to wait for the relay's record of why it dropped the index."""

NAMED = 3
"""Documents to name in a message."""

REFUSALS = 50
"""Refused events to read; some may be of an earlier index of the same name."""

DISCARDED = 500

SENDING = 30.0
"""Seconds beyond the destination's timeout to wait for events that are being sent."""

Tell: TypeAlias = Callable[[str], None]
log = logging.getLogger(__name__)


class ReindexFailed(RelayboxError):
    """The index was not rebuilt, and the old one still serves; the text says why."""


@asynccontextmanager
async def alone(
    records: OutboxRecords, actor: str, destination: str, details: Mapping[str, Any]
) -> AsyncIterator[Runner]:
    """Run as the only reindex of a destination until the end of the block. Raise if another one is alive."""
    id_ = uuid7()
    about = {"destination": destination, **details, "process": this_process().name}
    await records.ledger.journal.begin(id_, "reindex", actor, about, None)
    # Another reindex may begin after STALLED; this one must have ended by then.
    limits: Any = {"failure": ReindexFailed, "silence": STALLED / 2}
    async with Runner(id_, records.ledger.journal, "interrupted", **limits) as runner:
        for other in await unfinished(records, destination):
            if other.id == id_:
                continue
            if not is_dead(other):
                since = f"({other.actor}, since {other.started_at:%H:%M:%S} UTC)"
                fix = f"wait for it, or end it with {command(f'reindex --destination {destination} --abort')}"
                raise ReindexFailed(f"a reindex of {destination!r} is running {since}: {fix}")
            await _bury(records, other)
        yield runner


async def reindexes(records: OutboxRecords, destination: str) -> list[Operation]:
    """Return the latest reindexes of a destination."""
    recorded = [one for one in await records.ledger.journal.operations(LOOKED_AT) if one.action == "reindex"]
    return [one for one in recorded if one.details.get("destination") == destination]


async def unfinished(records: OutboxRecords, destination: str) -> list[Operation]:
    """Return the reindexes of a destination that have not ended."""
    return [one for one in await reindexes(records, destination) if one.finished_at is None]


async def end_all(records: OutboxRecords, destination: str, running: Iterable[Operation]) -> None:
    """Cancel a destination's running reindexes, and wait until the live ones have noticed."""
    for one in running:
        await records.admin.cancel(one.id)
    give_up = time.monotonic() + STALLED
    while living := [one for one in await unfinished(records, destination) if not is_dead(one)]:
        if time.monotonic() > give_up:
            raise ReindexFailed(f"a reindex of {destination!r} does not end ({living[0].actor})")
        await asyncio.sleep(POLL)
    for one in await unfinished(records, destination):
        await _bury(records, one)


def is_dead(operation: Operation) -> bool:
    """True if no process works on the operation any more."""
    silent = (operation.seen_at - operation.updated_at).total_seconds()
    return is_abandoned(silent, operation.details.get("process", ""))


async def _bury(records: OutboxRecords, dead: Operation) -> None:
    """Record a dead reindex as failed, so that it stays dead if its process wakes up."""
    await records.ledger.journal.finish(dead.id, "failed", dead.done, dead.skipped, "its process ended")


class BuildWatch:
    """Checks that a build's index exists and its events arrive, and reports what holds them up."""

    def __init__(self, building: Workspace, identity: str, patience: float, tell: Tell) -> None:
        self.backlog: int | None = None
        """Pending deliveries of the destination that the backfill waits for."""
        self._building = building
        self._records = building.records
        self._index = building.index
        self._identity = identity
        self._patience = patience
        self._tell = tell
        self._pending = 0
        self._began_at = self._moved_at = self._answered_at = time.monotonic()
        self._reported: str | None = None

    async def run(self) -> None:
        """Check again and again, until ``ReindexFailed`` is raised."""
        while True:
            began = time.monotonic()
            await self.check_index()
            try:
                await self.check_failed()
                await self.pending()
                await self._check_progress()
            except StoreError as error:
                log.warning("the database does not say how the build goes: %s", error)
            # Counting is slow if much is pending.
            await asyncio.sleep(max(POLL, 5 * (time.monotonic() - began)))

    async def pending(self) -> int:
        """Return how many events of the build have not arrived."""
        pending = await self._records.undelivered.pending_for(self._building.destination.name, self._index)
        if pending != self._pending or not (pending or self.backlog):
            self._moved_at = time.monotonic()
        self._pending = pending
        return pending

    async def check_index(self, *, strict: bool = False) -> None:
        """Raise if the index is gone or was replaced. Wait for an unavailable engine, unless ``strict``."""
        try:
            present = await self._building.engine.present([self._index])
        except TROUBLE as error:
            if strict or time.monotonic() - self._answered_at > self._patience:
                raise ReindexFailed(f"the search engine does not answer: {error}") from error
            return
        self._answered_at = time.monotonic()
        if present.get(self._index) == self._identity:
            return
        # Even if a late write created another index of that name, ours was dropped.
        because = await self._dropped_because()
        if because or self._index not in present:
            raise ReindexFailed(f"{self._index!r} was dropped while it was built{because}")
        raise ReindexFailed(f"{self._index!r} is no longer the index that this reindex created")

    async def check_failed(self) -> None:
        """Raise if events of the build have failed."""
        failed = await self._records.undelivered.failed_for(
            self._building.destination.name, self._index, NAMED
        )
        if failed:
            texts = "; ".join(f"document {own}: {error or 'no reason given'}" for _, own, error in failed)
            raise ReindexFailed(f"{self._index!r} cannot be built, because events failed: {texts}")

    async def _dropped_because(self) -> str:
        """Return why a relay dropped the index; the refused events have the reason a moment later."""
        beginning, give_up = given_up(self._index), time.monotonic() + EXPLAINED
        filter = Filter(destination=self._building.destination.name, error=beginning)
        while time.monotonic() < give_up:
            page = await self._records.admin.events(filter, limit=REFUSALS)
            age = time.monotonic() - self._began_at
            own = [one for one in page.entries if (one.seen_at - one.updated_at).total_seconds() < age]
            reasons = [(one, str(one.error_message).removeprefix(beginning)) for one in own[:NAMED]]
            if texts := "; ".join(f"document {one.aggregate_id}: {reason}" for one, reason in reasons):
                return f", because it cannot have all documents: {texts}"
            await asyncio.sleep(POLL)
        return ""

    async def _check_progress(self) -> None:
        silent = time.monotonic() - self._moved_at
        if silent < QUIET:
            self._reported = None
            return
        reason = await self._held_up()
        if silent > self._patience:
            if reason is None:
                flows = await self._records.ledger.history.flows({self._building.destination.name: LATELY})
                if flows[self._building.destination.name].settles:
                    # Events that were emitted before the build's are still ahead.
                    self._moved_at = time.monotonic()
                    return
                reason = "a relay is alive, but nothing is delivered"
            raise ReindexFailed(f"no event of the build has arrived for {silent:.0f} s: {reason}")
        if reason is not None and reason != self._reported:
            self._tell(f"waiting for {self._pending + (self.backlog or 0):,} events: {reason}")
            self._reported = reason

    async def _held_up(self) -> str | None:
        """Return why nothing arrives, if known. Raise if that cannot change by itself."""
        ledger, name = self._records.ledger, self._building.destination.name
        if not any(map(is_alive, await ledger.overview.relays())):
            return f"no relay runs: start one with {command('relay')}"
        place = (await ledger.overview.states()).get(name)
        if place is not None and place.paused:
            return f"{name} is paused: {command(f'resume {name}')}"
        if place is not None and place.circuit != "closed":
            return f"the circuit of {name} is open: {place.circuit_reason or 'no reason given'}"
        block = self._building.destination.on_failed == "block"
        for id_, document, _ in await self._records.undelivered.waiting_for(name, self._index, NAMED):
            found = await ledger.entries.find(id_, exact=True)
            for key in [entry.ordering_key for entry in found if entry.ordering_key is not None]:
                head = await ledger.entries.head(name, key, block=block)
                if head is not None and head.status == "failed":
                    fix = f"see {command(f'why {head.event_id}')}, and retry or discard the failed event"
                    raise ReindexFailed(f"document {document} waits behind an event that failed: {fix}")
        return None


class Leftovers:
    """What an interrupted build leaves behind: its index, and events for it."""

    def __init__(
        self, records: OutboxRecords, destination: Destination, engine: Engine, index: str, tell: Tell
    ) -> None:
        self._records = records
        self._destination = destination
        self._engine = engine
        self._index = index
        self._tell = tell

    async def look(self) -> None:
        """Report what would be removed."""
        if self._index in await self._engine.present([self._index]):
            self._tell(f"would drop {self._index}")
        rows = await self._records.undelivered.open_for(self._destination.name, self._index, DISCARDED + 1)
        if rows:
            many = f"{len(rows):,}" if len(rows) <= DISCARDED else f"more than {DISCARDED:,}"
            self._tell(f"would discard {many} events for {self._index}")

    async def clear(self) -> None:
        """Remove everything. A relay that has seen the index may still write to it and so recreate it."""
        left = self._index in await self._engine.present([self._index])
        if left:
            self._tell(f"dropping {self._index}, which was left behind")
        # An index that ``present`` hides from relays may still exist.
        await self._engine.drop(self._index)
        if await self.discard() or left:
            await self.sweep()

    async def sweep(self) -> None:
        """Wait until no relay writes to the dropped index, then drop what such writes created."""
        dropped_at = time.monotonic()
        await asyncio.sleep(2 * LOOK)
        give_up = dropped_at + 2 * LOOK + self._destination.timeout
        while time.monotonic() < give_up:
            ago = time.monotonic() - dropped_at - LOOK
            if not await self._records.undelivered.sent_before(self._destination.name, ago):
                break
            await asyncio.sleep(POLL)
        await self._engine.drop(self._index)

    async def discard(self) -> int:
        """Discard the events of a build, waiting for those that are being sent; return their number."""
        name, discarded = self._destination.name, 0
        give_up = time.monotonic() + SENDING + self._destination.timeout
        while rows := await self._records.undelivered.open_for(name, self._index, DISCARDED):
            done = await self._records.admin.discard(Named([id_ for id_, *_ in rows], exact=True))
            discarded += done.affected
            if not done.affected:
                if time.monotonic() > give_up:
                    raise ReindexFailed(f"events of an earlier build of {self._index!r} are still being sent")
                await asyncio.sleep(POLL)
        return discarded
