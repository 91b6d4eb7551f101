"""Checks of the configuration: the settings, and the sinks that they name."""

from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

from relaybox.core.commands import Program
from relaybox.core.exposure import exposures
from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.core.settings import ConfigWarning, Destination, Settings
from relaybox.core.values import mask_url
from relaybox.database.debezium import missing
from relaybox.errors import RelayboxError
from relaybox.operate.doctor.check import Context, Finding, Results, Unseen, check, split_fix, typed
from relaybox.sinks.open import handler_of, open_sink
from relaybox.sinks.sink import describe

ANSWER_SECONDS = 5.0
"""Seconds that a sink has to answer, and then to close."""


@check(needs="settings")
async def settings(context: Context) -> Results:
    """Find valid settings that hardly do what was meant or expose something, and unused destinations."""
    configured = context.settings.destinations
    if not configured:
        detail = "nothing that is emitted can be delivered"
        fix = "add a destination to the settings, or name the application that has them with --app"
        yield Finding("error", "no destinations are configured", detail, fix)
    reached = {name for route in context.settings.routes for name in route.to}
    reached |= {destination.dead_letter for destination in configured if destination.dead_letter}
    for destination in configured:
        name = destination.name
        for text in _warnings(destination):
            seen, _, fix = text.partition("; ")
            yield Finding("warning", f"a setting of destination {name!r}", seen, fix)
        for exposure in exposures(destination, os.environ):
            yield Finding("warning", *exposure)
        if name not in reached:
            detail = "no route and no dead_letter leads to it: only an emit that names it"
            fix = Program.route.format("TYPE").replace("…", name)
            yield Finding("info", f"destination {name!r} gets no events by itself", detail, fix)


def _warnings(destination: Destination) -> list[str]:
    """Return the warnings of a destination again: they were issued when the process started."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        replace(destination)
    return [str(one.message) for one in caught if issubclass(one.category, ConfigWarning)]


@check(needs="settings")
async def sinks(context: Context) -> Results:
    """Find missing secrets, functions and packages, and sinks that do not answer; all concurrently."""
    looks = [_sink(context, destination) for destination in context.settings.destinations]
    for found in await asyncio.gather(*looks):
        if found is not None:
            yield found


async def _sink(context: Context, destination: Destination) -> Finding | Unseen | None:
    name = destination.name
    try:
        destination.check_secrets()
        if destination.handed_over:
            return await _log(context.settings, destination)
        if destination.once:
            handler_of(destination, context.handlers)
            return None
        sink = open_sink(destination, context.handlers)
    except RelayboxError as error:
        seen, fix = split_fix(str(error).removeprefix(f"destination {name!r}: "))
        if not fix:
            seen, _, fix = seen.partition(": ")
        title = f"destination {name!r} cannot be sent to"
        return Finding("error", title, seen, fix or "correct the destination's settings")
    except Exception as error:
        return Unseen(f"destination {name!r}: {describe(error)}")
    try:
        return await _reach(destination, sink)
    finally:
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_SECONDS):
                await sink.close()


async def _log(settings: Settings, destination: Destination) -> Finding | None:
    if not (lacking := await asyncio.to_thread(missing, settings, destination)):
        return None
    title = f"Debezium cannot read what is emitted for destination {destination.name!r}"
    detail = f"the server has no {' and no '.join(lacking)} for it; what is emitted now is never sent"
    return Finding("error", title, detail, f"{typed('debezium', destination.name, '--sql')} | psql")


async def _reach(destination: Destination, sink: Any) -> Finding | None:
    if not hasattr(sink, "check"):
        return None
    seconds = min(ANSWER_SECONDS, destination.timeout)
    try:
        async with asyncio.timeout(seconds):
            await sink.check()
    except TimeoutError:
        return _failing(destination, f"no answer within {seconds:g} s", silent=True)
    except (Unavailable, Retry, Reject) as error:
        silent = isinstance(error, Unreachable) or error.reason.startswith("no answer")
        return _failing(destination, error.reason, silent=silent)
    return None


def _failing(destination: Destination, reason: str, *, silent: bool) -> Finding:
    name, seen, fix = destination.name, reason, ""
    title, act = f"destination {name!r} does not answer", "start it, or correct its sink"
    if not silent:
        title = f"destination {name!r} cannot be sent to"
        act = "correct the destination's sink, auth or options, or repair the destination itself"
        seen, fix = split_fix(reason) if "allow" in reason else (reason, "")
    waits = f"events wait meanwhile, and `{typed('resume', name)}` ends the wait"
    return Finding("error", title, f"{mask_url(destination.sink)}: {seen}", fix or f"{act}; {waits}")
