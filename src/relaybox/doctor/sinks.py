"""Each destination's secrets and sink, and whether it answers; all at once, each with a time of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from relaybox.config import Destination, Settings
from relaybox.debezium import missing
from relaybox.doctor.check import Context, Results, typed
from relaybox.doctor.finding import Finding, Unseen
from relaybox.errors import ConfigError, RelayboxError
from relaybox.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.parts import handler_of, open_sink
from relaybox.setting import mask_url
from relaybox.sink import describe

ANSWER_SECONDS = 5.0
"""How long a sink has to answer, and then to close."""


async def look(context: Context) -> Results:
    """Every destination, in the order of the settings."""
    looks = [_look(context, destination) for destination in context.settings.destinations]
    for results in await asyncio.gather(*looks):
        for one in results:
            yield one


async def _look(context: Context, destination: Destination) -> list[Finding | Unseen]:
    name = destination.name
    try:
        _check_secrets(destination)
        if destination.handed_over:
            return await _look_at_log(context.settings, destination)
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
    """Functions and the console have nothing to be reached."""
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


async def _look_at_log(settings: Settings, destination: Destination) -> list[Finding | Unseen]:
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
