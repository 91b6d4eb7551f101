"""Settings that are allowed but will hardly do what was meant."""

from __future__ import annotations

import warnings
from dataclasses import replace

from relaybox.config import ConfigWarning, Destination, Settings
from relaybox.doctor.check import Context, Results
from relaybox.doctor.finding import Finding
from relaybox.program import Program


async def look(context: Context) -> Results:
    """Warnings of the settings themselves, and destinations that nothing leads to."""
    settings = context.settings
    if not settings.destinations:
        detail = "nothing that is emitted can be delivered"
        fix = "add a destination to the settings, or name the application that has them with --app"
        yield Finding("error", "no destinations are configured", detail, fix)
    for destination in settings.destinations:
        for text in _warnings(destination):
            seen, _, fix = text.partition("; ")
            yield Finding("warning", f"a setting of destination {destination.name!r}", seen, fix)
        if not _is_reached(destination, settings):
            detail = "no route and no dead_letter leads to it: only an emit that names it"
            fix = Program.route.format("TYPE").replace("…", destination.name)
            yield Finding("info", f"destination {destination.name!r} gets no events by itself", detail, fix)


def _warnings(destination: Destination) -> list[str]:
    """What was said when it was made, once more: then it may have been long ago."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace(destination)
    return [str(one.message) for one in caught if issubclass(one.category, ConfigWarning)]


def _is_reached(destination: Destination, settings: Settings) -> bool:
    name = destination.name
    return any(name in route.to for route in settings.routes) or any(
        other.dead_letter == name for other in settings.destinations
    )
