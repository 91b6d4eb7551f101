"""Find the destination settings that upkeep uses: this relay's, and those that other relays reported.

Relays may have different settings, at least during a deploy. So each running relay writes its settings to the
database, again and again. Upkeep uses the settings reported lately. If no running relay knows a destination,
it uses the last report; without any report it leaves the rows alone. If relays differ, it uses what is safe
for all: the longest retention, and order and blocking by a failed event if any relay wants them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from relaybox.core.settings import Destination
from relaybox.core.values import show_duration
from relaybox.errors import NoTables
from relaybox.stores.sql.upkeep.agreement import SqlReports
from relaybox.stores.upkeep import Report, Setting

AGAIN = 60.0
"""Seconds after which a relay reports its settings again."""
SILENT = 600.0
"""Seconds after which a report is outdated. A running relay repeats its report at least with every sweep."""

log = logging.getLogger(__name__)


class Agreement:
    """Reports this relay's settings, and returns those that upkeep uses for every known destination."""

    def __init__(self, reports: SqlReports, destinations: Iterable[Destination], name: str) -> None:
        self._reports = reports
        self._mine = {destination.name: setting_of(destination) for destination in destinations}
        self._name = name
        self.runs = False
        """True if this relay keeps running. It then reports even settings that another relay also reports."""
        self._reported: dict[str, set[Setting]] = {}
        self._alone = False
        self._known: Mapping[str, frozenset[str]] = {}

    async def __call__(self) -> dict[str, Setting]:
        """Report settings if due, and return those to use by destination."""
        try:
            reports = await self._reports.read()
        except NoTables as error:
            return self._known_alone(error)
        self._alone = False
        lately = {
            (one.destination, one.setting)
            for one in reports
            if one.age < AGAIN and (not self.runs or one.relay == self._name)
        }
        new = {name: setting for name, setting in self._mine.items() if (name, setting) not in lately}
        # Replace outdated reports only for destinations that this relay has. For others, the last report
        # is still in use if no running relay has the destination.
        known = [one for one in reports if one.destination in self._mine and one.relay != self._name]
        outdated = [one for one in known if one.age > SILENT]
        if new or outdated:
            await self._reports.write(self._name, new, outdated)
        reports = (
            *reports,
            *(Report(name, setting, self._name, 0.0) for name, setting in self._mine.items()),
        )
        self._report(reports)
        return {name: holds(each) for name, each in by_destination(reports).items()}

    async def introduce(self) -> None:
        """Report all settings before joining, so that other relays never see only some of them."""
        try:
            await self._reports.write(self._name, self._mine, ())
        except NoTables as error:
            self._known_alone(error)

    def strange(self, members: Collection[str]) -> bool:
        """True if a member's destinations are not known yet. Once known, they stay the same while it runs."""
        return not self._alone and bool(set(members) - self._known.keys() - {self._name})

    async def meet(self, members: Collection[str]) -> None:
        """Read which destinations the members have."""
        with suppress(NoTables):
            known = await self._reports.known()
            self._known = {name: known[name] for name in members if name in known}

    def may_have(self, member: str, destination: str) -> bool:
        """True if that relay may have the destination; also if it reports nothing, as older releases do."""
        return member not in self._known or destination in self._known[member]

    async def leave(self) -> None:
        """Mark this relay's reports as outdated, because it no longer runs."""
        with suppress(NoTables):
            await self._reports.outdate(self._name)

    def _known_alone(self, error: NoTables) -> dict[str, Setting]:
        if not self._alone:
            log.warning("cannot read other relays' settings; upkeep uses only its own: %s", error)
        self._alone = True
        return dict(self._mine)

    def _report(self, reports: Iterable[Report]) -> None:
        """Log how relays differ, once for each difference."""
        found = differences(reports)
        for name, each in found.items():
            settings = {one.setting for one in each}
            if self._reported.get(name) != settings:
                log.warning("relays differ: %s", describe(name, each))
            self._reported[name] = settings
        for name in self._reported.keys() - found.keys():
            del self._reported[name]
            log.info("relays agree on the settings of %r again", name)


def setting_of(destination: Destination) -> Setting:
    """Return the settings of a destination that upkeep needs."""
    on_failed = destination.on_failed
    assert on_failed is not None, "a destination that was made has one"
    return Setting(float(destination.retention), destination.ordered, on_failed)


def by_destination(reports: Iterable[Report]) -> dict[str, list[Report]]:
    """Return the latest reports by destination; the outdated ones if there are no others."""
    every: dict[str, list[Report]] = defaultdict(list)
    for one in reports:
        every[one.destination].append(one)
    return {name: [one for one in each if one.age <= SILENT] or each for name, each in every.items()}


def holds(reports: Iterable[Report]) -> Setting:
    """Return the settings that are safe for all these relays."""
    settings = [one.setting for one in reports]
    return Setting(
        retention=max(setting.retention for setting in settings),
        ordered=any(setting.ordered for setting in settings),
        on_failed="block" if any(setting.on_failed == "block" for setting in settings) else "skip",
    )


def differences(reports: Iterable[Report]) -> dict[str, list[Report]]:
    """Return the reports of running relays for destinations where they differ."""
    lately = by_destination(one for one in reports if one.age <= SILENT)
    return {name: each for name, each in lately.items() if len({one.setting for one in each}) > 1}


def describe(name: str, reports: Iterable[Report]) -> str:
    """Return a text that says how relays differ on a destination, and which settings upkeep uses."""
    by_setting: Mapping[Setting, Report] = {one.setting: one for one in reports}
    each = "; ".join(f"{one.relay} has {_words(one.setting)}" for one in by_setting.values())
    return f"{name!r}: {each}. Until they agree upkeep goes by {_words(holds(by_setting.values()))}"


def _words(setting: Setting) -> str:
    ordered = f"ordered, on_failed = {setting.on_failed!r}" if setting.ordered else "not ordered"
    return f"retention = {show_duration(setting.retention)!r}, {ordered}"
