"""What relays report about their destinations, for ``relay/upkeep/agreement.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from relaybox.database.steps import Steps
from relaybox.stores.sql.rows import to_json
from relaybox.stores.sql.store import Topic, driven
from relaybox.stores.sql.upkeep.term import LONG_AGO
from relaybox.stores.upkeep import Report, Setting


class SqlReports(Topic):
    """The settings that relays reported."""

    @driven
    def read(self) -> Steps[tuple[Report, ...]]:
        """Return what relays reported about destinations, sorted by name."""
        # The time comes last, so that no age is negative.
        rows, [[moment]] = yield [self.sql("said"), self.sql("now")]
        now = self.dialect.from_time(moment)
        reports = []
        for destination, relay, setting, at in rows:
            # Ignore a report that was edited by hand, or that a later release wrote in another form.
            with suppress(msgspec.MsgspecError):
                age = (now - self.dialect.from_time(at)).total_seconds()
                reports.append(Report(destination, _setting(setting), relay, age))
        return tuple(reports)

    @driven
    def known(self) -> Steps[dict[str, frozenset[str]]]:
        """Return the destinations that each relay reported about."""
        [rows] = yield [self.sql("known")]
        known: dict[str, set[str]] = defaultdict(set)
        for relay, destination in rows:
            known[relay].add(destination)
        return {relay: frozenset(names) for relay, names in known.items()}

    @driven
    def write(self, relay: str, settings: Mapping[str, Setting], outdated: Sequence[Report]) -> Steps[None]:
        """Report settings in one transaction; forget outdated reports, unless renewed or from a member."""
        # In a fixed order, so that two relays do not deadlock.
        writes = [
            self.sql("say", me=relay, destination=name, setting=to_json(setting))
            for name, setting in sorted(settings.items())
        ]
        forgets = [
            self.sql("unsay", destination=one.destination, relay=one.relay, seconds=-one.age)
            for one in outdated
        ]
        yield [*writes, *forgets]

    @driven
    def outdate(self, relay: str) -> Steps[None]:
        """Mark a relay's reports as old, without forgetting them."""
        yield [self.sql("fall_silent", me=relay, at=self.dialect.to_time(LONG_AGO))]


def _setting(value: Any) -> Setting:
    if isinstance(value, str | bytes):
        return msgspec.json.decode(value, type=Setting)
    return msgspec.convert(value, Setting)
