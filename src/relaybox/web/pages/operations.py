"""``/operations``: bulk actions, how far they are, and how they ended; ``/audit``: who did what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from relaybox.stores.journal import Operation
from relaybox.web import read
from relaybox.web.redact import Rules, redact
from relaybox.web.show import plural
from relaybox.web.signed import number
from relaybox.web.templating import page, paging

FIRST = ("destination", "from", "status", "to", "reason")
"""What is said first of an operation or an action."""


async def operations(request: Request) -> Response:
    """The newest operations."""
    found = await request.state.admin.operations()
    running = sum(one.state == "running" for one in found)
    return page(
        request,
        "operations.html",
        operations=[(one, told(one.details, request.app.rules), _progress(one)) for one in found],
        spoken=f"{plural(running, 'operation')} running" if running else "No operation runs",
    )


def _progress(one: Operation) -> str:
    of = "" if one.total is None else f" of {one.total:,}{'+' if one.capped else ''}"
    skipped = f", {one.skipped:,} skipped" if one.skipped else ""
    return f"{one.done:,}{of}{skipped}"


async def audit(request: Request) -> Response:
    """What operators did, newest first."""
    cursor = read.parsed(number, request.query_params.get("cursor", ""))
    found = await request.state.admin.audits(cursor=cursor)
    rows = [(row, told(row.details, request.app.rules)) for row in found.rows]
    return page(request, "audit.html", rows=rows, **paging(request, "/audit", cursor, found.cursor))


def told(about: Mapping[str, Any], rules: Rules) -> str:
    """Details of an operation or an audit row in words: names and values, those of a filter among them."""
    details: Mapping[str, Any] = redact(about, rules)
    flat = {**_filter(details), **{name: value for name, value in details.items() if name != "filter"}}
    names = [*(name for name in FIRST if name in flat), *(name for name in flat if name not in FIRST)]
    given = [name for name in names if flat[name] not in (None, "", [])]
    return ", ".join(f"{name.replace('_', ' ')} {_value(flat[name])}" for name in given)


def _filter(details: Mapping[str, Any]) -> Mapping[str, Any]:
    filter = details.get("filter")
    return filter if isinstance(filter, Mapping) else {}


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value[:3])) + (f" and {len(value) - 3} more" if len(value) > 3 else "")
    return str(value)
