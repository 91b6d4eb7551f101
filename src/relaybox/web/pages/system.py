"""The pages ``/relays``, ``/operations``, ``/audit`` and ``/system``."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.redact import Rules, redact
from relaybox.core.settings import Settings, mask_url
from relaybox.core.text import duration, plural, size
from relaybox.core.values import parsed
from relaybox.database.migrations import NEWEST, current_version
from relaybox.errors import RelayboxError
from relaybox.operate.why import is_alive, is_leader
from relaybox.stores.journal import Operation
from relaybox.web.auth import number
from relaybox.web.templating import page, paging

PATIENCE = 3.0
"""Seconds to wait for the schema version."""
FIRST = ("destination", "from", "status", "to", "reason")


async def operations(request: Request) -> Response:
    """Show the newest bulk actions and their progress."""
    found = await request.state.admin.operations()
    running = sum(one.state == "running" for one in found)
    return page(
        request,
        "operations.html",
        operations=[(one, detail_text(one.details, request.app.rules), _progress(one)) for one in found],
        spoken=f"{plural(running, 'operation')} running" if running else "No operation runs",
    )


def _progress(one: Operation) -> str:
    of = "" if one.total is None else f" of {one.total:,}{'+' if one.capped else ''}"
    skipped = f", {one.skipped:,} skipped" if one.skipped else ""
    return f"{one.done:,}{of}{skipped}"


async def audit(request: Request) -> Response:
    """Show what operators did, newest first."""
    cursor = parsed(number, request.query_params.get("cursor", ""))
    found = await request.state.admin.audits(cursor=cursor)
    rows = [(row, detail_text(row.details, request.app.rules)) for row in found.rows]
    return page(request, "audit.html", rows=rows, **paging(request, "/audit", cursor, found.cursor))


def detail_text(about: Mapping[str, Any], rules: Rules) -> str:
    """Return the details of an operation or audit row in words, with those of its filter."""
    details: Mapping[str, Any] = redact(about, rules)
    filter = details.get("filter")
    given = filter if isinstance(filter, Mapping) else {}
    flat = {**given, **{name: value for name, value in details.items() if name != "filter"}}
    names = [*(name for name in FIRST if name in flat), *(name for name in flat if name not in FIRST)]
    said = [name for name in names if flat[name] not in (None, "", [])]
    return ", ".join(f"{name.replace('_', ' ')} {_value(flat[name])}" for name in said)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value[:3])) + (f" and {len(value) - 3} more" if len(value) > 3 else "")
    return str(value)


async def relays(request: Request) -> Response:
    """Show the relays seen last, and which of them leads."""
    seen = (await request.state.admin.stats()).relays
    shown = [(one, is_alive(one), is_leader(one)) for one in seen]
    spoken = f"{plural(sum(alive for _, alive, _ in shown), 'relay')} alive"
    return page(request, "relays.html", relays=shown, spoken=spoken)


async def system(request: Request) -> Response:
    """Show health, versions, database and settings, without secrets."""
    settings: Settings = request.app.outbox.settings
    health = await request.state.admin.health()
    database = [
        ("Database", mask_url(settings.database)),
        ("Schema", settings.schema or "the default one"),
        ("Prefix of the tables", settings.prefix or "none"),
        ("Schema version", await _schema_version(settings)),
    ]
    sections = [
        ("Database", database),
        ("Program", [("Relaybox", version("relaybox")), ("Python", platform.python_version())]),
        ("Settings", list(_general(settings))),
    ]
    headline = "Work flows." if health.ready else "Deliveries do not flow as they should."
    return page(
        request, "system.html", health=health, headline=headline, sections=sections, routes=settings.routes
    )


async def _schema_version(settings: Settings) -> str:
    read = partial(current_version, settings.database, schema=settings.schema, prefix=settings.prefix)
    try:
        async with asyncio.timeout(PATIENCE):
            seen = await asyncio.to_thread(read)
    except (RelayboxError, OSError, TimeoutError):
        return "unknown: the database did not say"
    if seen == NEWEST:
        return f"{seen}, the newest"
    return f"{seen}; this release knows {NEWEST}: run relaybox migrate"


def _general(settings: Settings) -> Iterator[tuple[str, str]]:
    yield "Destinations", str(len(settings.destinations))
    yield "Unrouted events", {"raise": "are refused", "store": "wait for a route"}[settings.unrouted]
    yield "Wake by NOTIFY", "yes" if settings.notify else "no"
    yield "Largest payload", size(settings.max_payload)
    yield "Inbox keeps", duration(settings.inbox_window)
    yield "Idempotency keys are kept", f"{duration(settings.idempotency_window)} after the delivery"
    yield "Application", settings.app or "none named"
