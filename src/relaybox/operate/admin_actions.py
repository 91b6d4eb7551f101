"""The actions of ``Admin``, as its base class."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, Unpack
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core.settings import Destination
from relaybox.operate.action import ActionRun, Change, Done, Named, Options, Ready, What, walk
from relaybox.operate.configured import STATUSES, Action, Configured, check_named
from relaybox.stores.ledger import Audit, Counted, Entry, Filter, State
from relaybox.stores.sql.ledger import SqlLedger

NAMED = 100
"""Ids that an audit row lists; it counts all of them."""

CANARY = "canary"
"""The aggregate id of test events that no operator asked for."""


class AdminActions:
    """The half of ``Admin`` that changes something."""

    def __init__(self, ledger: SqlLedger, destinations: Iterable[Destination], actor: str) -> None:
        self._ledger = ledger
        self._configured = Configured(ledger.overview, destinations)
        self._destinations = self._configured.destinations
        self._actor = actor

    async def retry(self, what: What, **options: Unpack[Options]) -> Done:
        """Restart failed deliveries with all their attempts, at their old place in the order.

        An id may also name one that backs off: it becomes due now.
        """
        return await self._act(
            "retry",
            what,
            lambda entry: entry.state is State.FAILED or entry.backing_off,
            lambda entries, audit: self._ledger.changes.retry(entries, self._configured.policies, audit),
            {},
            options,
        )

    async def discard(self, what: What, **options: Unpack[Options]) -> Done:
        """Give up failed and pending deliveries, by default failed; the next one of each key becomes due."""
        return await self._act(
            "discard",
            what,
            lambda entry: entry.status in ("pending", "failed") and entry.state is not State.SENDING,
            lambda entries, audit: self._ledger.changes.discard(entries, self._configured.policies, audit),
            {},
            options,
        )

    async def replay(self, what: What, *, to: str | None = None, **options: Unpack[Options]) -> Done:
        """Send final deliveries again, each as a new row of the same event, with a header that says so.

        A filter finds delivered ones unless its status says otherwise.
        """
        configured = self._configured
        configured.check_target("replay", to)
        return await self._act(
            "replay",
            what,
            lambda entry: entry.status != "pending" and (to or entry.destination) in self._destinations,
            lambda entries, audit: self._ledger.changes.replay(entries, to, configured.policies, audit),
            {} if to is None else {"to": to},
            options,
        )

    async def move(self, from_: str, to: str, **options: Unpack[Options]) -> Done:
        """Give pending and failed deliveries to another destination, where failed ones stay failed.

        Deliveries that are being sent stay, and count as skipped.
        """
        await self._configured.check_known(from_)
        self._configured.check_target("move", to, from_)
        run, done = ActionRun(self._ledger.entries, **options), Done()
        passed_over: datetime | None = None

        async def change(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            nonlocal passed_over
            ids = {entry.id for entry in entries}
            if run.dry_run or not ids:
                return ids
            moved = await self._ledger.changes.move(entries, to, self._configured.policies, audit)
            if not moved <= ids:
                passed_over = entries[0].seen_at
            return moved

        for status in STATUSES["move"]:
            filter = Filter(status, from_)
            audit = Audit(self._actor, "move", {"from": from_, "to": to, "status": status})
            done = await run.on_found(filter, change, audit, done)
            # Ids need not follow a key's order: rows that others overtook are behind the walk, so walk again.
            while passed_over is not None and not run.pace.stopped:
                filter, passed_over = replace(filter, until=filter.until or passed_over), None
                done = await run.on_found(filter, change, audit, done)
        left = (await self._ledger.overview.counts([from_]))[from_].sending
        return replace(done, skipped=max(done.skipped, left))

    async def count(self, action: Action, filter: Filter, *, to: str | None = None) -> Counted:
        """Count the rows that the action would affect, up to ``ledger.CAP``; raise as the action would."""
        entries = self._ledger.entries
        if action == "move":
            from_ = filter.destination or ""
            await self._configured.check_known(from_)
            self._configured.check_target(action, to, from_)
            parts = [await entries.count(Filter(status, from_)) for status in STATUSES[action]]
            return Counted(sum(one.count for one in parts), any(one.capped for one in parts))
        if action == "replay":
            self._configured.check_target(action, to)
        return await entries.count(await self._configured.check_filter_of(action, filter))

    async def pause(self, destination: str, reason: str, until: datetime | None = None) -> None:
        """Stop all sends to a destination, until that moment or until it is resumed."""
        await self._configured.check_known(destination)
        self._configured.check_relayed(destination, "pause the connector instead")
        details = {"destination": destination, "reason": reason, "until": until}
        await self._ledger.changes.pause(destination, reason, until, Audit(self._actor, "pause", details))

    async def resume(self, destination: str) -> bool:
        """End a pause and close an open circuit, so the next claim gets through. True if there was one."""
        await self._configured.check_known(destination)
        audit = Audit(self._actor, "resume", {"destination": destination})
        return await self._ledger.changes.resume(destination, audit)

    async def test(self, destination: str, *, audited: bool = True) -> UUID:
        """Emit a test event, without order, and return its id. A relay's canary is not ``audited``."""
        configured = self._configured
        check_named(destination, self._destinations)
        configured.check_relayed(destination, "emit an event instead")
        id_ = uuid7()
        payload = {"test": True, "destination": destination, "sent_by": self._actor}
        await self._ledger.changes.write_test(
            id_,
            destination,
            "test" if audited else CANARY,
            msgspec.json.encode(payload).decode(),
            self._destinations[destination].max_attempts,
            Audit(self._actor, "test", {"destination": destination, "event_id": id_}) if audited else None,
        )
        return id_

    async def note(self, action: str, details: Mapping[str, Any]) -> None:
        """Audit an action that changes no row, such as a login."""
        await self._ledger.journal.note(Audit(self._actor, action, details))

    def walk(self, filter: Filter) -> AsyncIterator[Sequence[Entry]]:
        """Yield what matches the filter, each once, oldest first, without later arrivals."""
        return walk(self._ledger.entries, filter)

    async def _act(
        self,
        action: str,
        what: What,
        ready: Ready,
        change: Change,
        details: Mapping[str, Any],
        options: Options,
    ) -> Done:
        """Apply an action to rows that are ready for it: a filter's in batches, named ones at once."""
        run = ActionRun(self._ledger.entries, **options)
        act = run.when_ready(ready, change)
        if isinstance(what, Filter):
            filter = await self._configured.check_filter_of(action, what)
            audit = Audit(self._actor, action, {"filter": described(filter), **details})
            return await run.on_found(filter, act, audit)
        named = what if isinstance(what, Named) else Named(what)
        await self._configured.check_known(named.destination)
        about: dict[str, Any] = {"ids": list(named.ids[:NAMED])}
        if named.destination is not None:
            about["destination"] = named.destination
        return await run.on_named(named, act, Audit(self._actor, action, {**about, **details}))


def described(filter: Filter) -> dict[str, Any]:
    """Return a filter's criteria as audits and operations record them."""
    return {name: value for name, value in asdict(replace(filter, rules=None)).items() if value is not None}
