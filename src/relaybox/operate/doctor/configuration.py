"""Checks of the configuration: the settings, and the sinks that they name."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

from relaybox.core.commands import Program
from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.core.settings import ConfigWarning, Destination, Settings
from relaybox.core.values import mask_url
from relaybox.database.debezium import missing
from relaybox.errors import ConfigError, RelayboxError
from relaybox.operate.doctor.check import Context, Finding, Results, Unseen, check, typed
from relaybox.sinks.open import handler_of, open_sink
from relaybox.sinks.sink import describe

ANSWER_SECONDS = 5.0
"""How long a sink has to answer, and then to close."""


@check(needs="settings")
async def settings(context: Context) -> Results:
    """Find settings that are allowed but hardly do what was meant, and destinations that nothing leads to."""
    configured = context.settings.destinations
    if not configured:
        detail = "nothing that is emitted can be delivered"
        fix = "add a destination to the settings, or name the application that has them with --app"
        yield Finding("error", "no destinations are configured", detail, fix)
    for destination in configured:
        for text in _warnings(destination):
            seen, _, fix = text.partition("; ")
            yield Finding("warning", f"a setting of destination {destination.name!r}", seen, fix)
        if not _is_reached(destination, context.settings):
            detail = "no route and no dead_letter leads to it: only an emit that names it"
            fix = Program.route.format("TYPE").replace("…", destination.name)
            yield Finding("info", f"destination {destination.name!r} gets no events by itself", detail, fix)


def _warnings(destination: Destination) -> list[str]:
    """Return the warnings of a destination again: they were issued when the process started."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace(destination)
    return [str(one.message) for one in caught if issubclass(one.category, ConfigWarning)]


def _is_reached(destination: Destination, settings: Settings) -> bool:
    name = destination.name
    return any(name in route.to for route in settings.routes) or any(
        other.dead_letter == name for other in settings.destinations
    )


@check(needs="settings")
async def sinks(context: Context) -> Results:
    """Find secrets, functions and packages that are missing, and sinks that do not answer; all at once."""
    looks = [_sink(context, destination) for destination in context.settings.destinations]
    for results in await asyncio.gather(*looks):
        for one in results:
            yield one


async def _sink(context: Context, destination: Destination) -> list[Finding | Unseen]:
    name = destination.name
    try:
        _check_secrets(destination)
        if destination.handed_over:
            return await _log(context.settings, destination)
        if destination.once:
            handler_of(destination, context.handlers)
            return []
        sink = open_sink(destination, context.handlers)
    except RelayboxError as error:
        return [_broken(name, error)]
    except Exception as error:
        return [Unseen(f"destination {name!r}: {describe(error)}")]
    try:
        return await _reach(destination, sink)
    finally:
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_SECONDS):
                await sink.close()


async def _reach(destination: Destination, sink: Any) -> list[Finding | Unseen]:
    """Connect to the sink, if it is of a kind that can be connected to."""
    if not hasattr(sink, "check"):
        return []
    try:
        async with asyncio.timeout(min(ANSWER_SECONDS, destination.timeout)):
            await sink.check()
    except TimeoutError:
        return [_dead(destination, f"no answer within {min(ANSWER_SECONDS, destination.timeout):g} s")]
    except (Unavailable, Retry, Reject) as error:
        if isinstance(error, Unreachable) or error.reason.startswith("no answer"):
            return [_dead(destination, error.reason)]
        return [_refusing(destination, error.reason)]
    return []


def _check_secrets(destination: Destination) -> None:
    for setting in ("secret", "auth"):
        secret = getattr(destination, setting)
        try:
            if secret is not None:
                secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from None


async def _log(settings: Settings, destination: Destination) -> list[Finding | Unseen]:
    lacking = await asyncio.to_thread(missing, settings, destination)
    if not lacking:
        return []
    title = f"Debezium cannot read what is emitted for destination {destination.name!r}"
    detail = f"the server has no {' and no '.join(lacking)} for it; what is emitted now is never sent"
    fix = f"{typed('debezium', destination.name, '--sql')} | psql"
    return [Finding("error", title, detail, fix)]


def _broken(name: str, error: RelayboxError) -> Finding:
    text = " ".join(str(error).split()).removeprefix(f"destination {name!r}: ")
    seen, _, fix = text.rpartition("; ")
    if not seen:
        seen, _, fix = text.partition(": ")
    title = f"destination {name!r} cannot be sent to"
    return Finding("error", title, seen or text, fix or "correct the destination's settings")


def _dead(destination: Destination, reason: str) -> Finding:
    title = f"destination {destination.name!r} does not answer"
    resume = typed("resume", destination.name)
    fix = f"start it, or correct its sink; events wait meanwhile, and `{resume}` ends the wait"
    return Finding("error", title, f"{mask_url(destination.sink)}: {reason}", fix)


def _refusing(destination: Destination, reason: str) -> Finding:
    title = f"destination {destination.name!r} cannot be sent to"
    place = mask_url(destination.sink)
    if "; " in reason and "allow" in reason:
        seen, _, fix = reason.rpartition("; ")
        return Finding("error", title, f"{place}: {seen}", fix)
    resume = typed("resume", destination.name)
    fix = (
        "correct the destination's sink, auth or options, or mend it there; events wait meanwhile, "
        f"and `{resume}` ends the wait"
    )
    return Finding("error", title, f"{place}: {reason}", fix)
