"""``/relays``: who delivers; ``/system``: the database, the schema, and the settings, without secrets."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import Settings, mask_url
from relaybox.database.migrations import NEWEST, current_version
from relaybox.errors import RelayboxError
from relaybox.operate.why import is_alive
from relaybox.web import show
from relaybox.web.templating import page

PATIENCE = 3.0
"""Seconds that the page waits for the schema's version."""


async def relays(request: Request) -> Response:
    """The relays that were seen lately, and which of them leads."""
    seen = (await request.state.admin.stats()).relays
    shown = [
        (one, is_alive(one), one.leads_until is not None and one.leads_until > one.seen_at) for one in seen
    ]
    spoken = f"{show.plural(sum(alive for _, alive, _ in shown), 'relay')} alive"
    return page(request, "relays.html", relays=shown, spoken=spoken)


async def system(request: Request) -> Response:
    """What this is, what it runs on, and whether it is well."""
    settings: Settings = request.app.outbox.settings
    health = await request.state.admin.health()
    sections = [
        ("Database", [*_database(settings), ("Schema version", await _schema_version(settings))]),
        ("Program", [("Relaybox", version("relaybox")), ("Python", platform.python_version())]),
        ("Settings", list(_general(settings))),
    ]
    headline = "Work flows." if health.ready else "Deliveries do not flow as they should."
    return page(
        request, "system.html", health=health, headline=headline, sections=sections, routes=settings.routes
    )


def _database(settings: Settings) -> Iterator[tuple[str, str]]:
    yield "Database", mask_url(settings.database)
    yield "Schema", settings.schema or "the default one"
    yield "Prefix of the tables", settings.prefix or "none"


async def _schema_version(settings: Settings) -> str:
    def read() -> int:
        return current_version(settings.database, schema=settings.schema, prefix=settings.prefix)

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
    yield "Largest payload", show.size(settings.max_payload)
    yield "Inbox keeps", show.duration(settings.inbox_window)
    yield "Idempotency keys are kept", f"{show.duration(settings.idempotency_window)} after the delivery"
    yield "Application", settings.app or "none named"
