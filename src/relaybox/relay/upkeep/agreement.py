"""What upkeep knows of destinations: what this relay's settings say, and what other relays said of theirs.

Relays may differ, at least during a deploy. So each writes what it knows to the database, again and again as
long as it runs. What was said of a destination lately holds; if no relay that runs knows it, what was said
last; if nothing was ever said, its rows are left alone. Where relays differ, what harms none of them holds:
the longest retention, and order and blocking by a failed event if one of them wants it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from relaybox.core.settings import Destination
from relaybox.core.values import show_duration
from relaybox.errors import NoTables
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Said, Setting

AGAIN = 60.0
"""Seconds after which what was said is said again."""
SILENT = 600.0
"""Seconds after which nobody runs any more who would say it, with every sweep at least."""

log = logging.getLogger(__name__)


class Agreement:
    """What holds for every destination that somebody knows, as this relay sees it."""

    def __init__(self, upkeep: SqlUpkeep, destinations: Iterable[Destination], name: str) -> None:
        self._upkeep = upkeep
        self._mine = {destination.name: setting_of(destination) for destination in destinations}
        self._name = name
        self.runs = False
        """Whether it runs on, and says itself what it knows; what ends soon only if nobody else says it."""
        self._reported: dict[str, set[Setting]] = {}
        self._alone = False
        self._known: Mapping[str, frozenset[str]] = {}

    async def __call__(self) -> dict[str, Setting]:
        """Say what has to be said, and learn what holds."""
        try:
            said = await self._upkeep.said()
        except NoTables as error:
            return self._known_alone(error)
        self._alone = False
        lately = {
            (one.destination, one.setting)
            for one in said
            if one.age < AGAIN and (not self.runs or one.relay == self._name)
        }
        new = {name: setting for name, setting in self._mine.items() if (name, setting) not in lately}
        # By one who knows the destination: what was said last holds where nobody runs that does.
        known = [one for one in said if one.destination in self._mine and one.relay != self._name]
        outdated = [one for one in known if one.age > SILENT]
        if new or outdated:
            await self._upkeep.say(self._name, new, outdated)
        said = (*said, *(Said(name, setting, self._name, 0.0) for name, setting in self._mine.items()))
        self._report(said)
        return {name: holds(each) for name, each in by_destination(said).items()}

    async def introduce(self) -> None:
        """Say all that this relay has, before it is a member: the others then never know a part of it."""
        try:
            await self._upkeep.say(self._name, self._mine, ())
        except NoTables as error:
            self._known_alone(error)

    def strange(self, members: Collection[str]) -> bool:
        """Whether one of them may have said by now what it has. That stays so as long as it lives."""
        return not self._alone and bool(set(members) - self._known.keys() - {self._name})

    async def meet(self, members: Collection[str]) -> None:
        """Learn which destinations they have."""
        with suppress(NoTables):
            known = await self._upkeep.known()
            self._known = {name: known[name] for name in members if name in known}

    def may_have(self, member: str, destination: str) -> bool:
        """Whether that relay may have the destination. One that said nothing, of an older release, may."""
        return member not in self._known or destination in self._known[member]

    async def leave(self) -> None:
        """Say no longer what was said: nothing need be done as if this relay still ran."""
        with suppress(NoTables):
            await self._upkeep.fall_silent(self._name)

    def _known_alone(self, error: NoTables) -> dict[str, Setting]:
        if not self._alone:
            log.warning("upkeep knows only of its own destinations: %s", error)
        self._alone = True
        return dict(self._mine)

    def _report(self, said: Iterable[Said]) -> None:
        """Say once how relays differ, until they differ in another way."""
        found = differences(said)
        for name, each in found.items():
            settings = {one.setting for one in each}
            if self._reported.get(name) != settings:
                log.warning("relays differ: %s", describe(name, each))
            self._reported[name] = settings
        for name in self._reported.keys() - found.keys():
            del self._reported[name]
            log.info("relays agree on the settings of %r again", name)


def setting_of(destination: Destination) -> Setting:
    """What upkeep needs to know of a destination."""
    on_failed = destination.on_failed
    assert on_failed is not None, "a destination that was made has one"
    return Setting(float(destination.retention), destination.ordered, on_failed)


def by_destination(said: Iterable[Said]) -> dict[str, list[Said]]:
    """By destination what was said of it lately; where nothing was, what was said last."""
    every: dict[str, list[Said]] = defaultdict(list)
    for one in said:
        every[one.destination].append(one)
    return {name: [one for one in each if one.age <= SILENT] or each for name, each in every.items()}


def holds(said: Iterable[Said]) -> Setting:
    """What harms none of those who said this."""
    settings = [one.setting for one in said]
    return Setting(
        retention=max(setting.retention for setting in settings),
        ordered=any(setting.ordered for setting in settings),
        on_failed="block" if any(setting.on_failed == "block" for setting in settings) else "skip",
    )


def differences(said: Iterable[Said]) -> dict[str, list[Said]]:
    """What was said of the destinations of which relays that run do not say the same."""
    lately = by_destination(one for one in said if one.age <= SILENT)
    return {name: each for name, each in lately.items() if len({one.setting for one in each}) > 1}


def describe(name: str, said: Iterable[Said]) -> str:
    """How relays differ in a destination, and what holds."""
    by_setting: Mapping[Setting, Said] = {one.setting: one for one in said}
    each = "; ".join(f"{one.relay} has {_words(one.setting)}" for one in by_setting.values())
    return f"{name!r}: {each}. Until they agree upkeep goes by {_words(holds(by_setting.values()))}"


def _words(setting: Setting) -> str:
    ordered = f"ordered, on_failed = {setting.on_failed!r}" if setting.ordered else "not ordered"
    return f"retention = {show_duration(setting.retention)!r}, {ordered}"
