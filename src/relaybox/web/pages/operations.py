"""``/operations``: bulk actions, how far they are, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from relaybox.stores.journal import Operation
from relaybox.web.redact import Rules, redact
from relaybox.web.render import scrubbed
from relaybox.web.show import plural
from relaybox.web.templating import page


@dataclass(frozen=True, slots=True)
class _Shown:
    id: UUID
    action: str
    state: str
    about: str
    progress: str
    error: str | None
    actor: str
    started_at: datetime
    done: int
    skipped: int
    total: int | None


async def operations(request: Request) -> Response:
    """The newest ones."""
    shown = [_shown(one, request.app.rules) for one in await request.state.admin.operations()]
    running = sum(one.state == "running" for one in shown)
    spoken = f"{plural(running, 'operation')} running" if running else "No operation runs"
    return page(request, "operations.html", operations=shown, spoken=spoken)


def _shown(one: Operation, rules: Rules) -> _Shown:
    of = "" if one.total is None else f" of {one.total:,}{'+' if one.capped else ''}"
    skipped = f", {one.skipped:,} skipped" if one.skipped else ""
    return _Shown(
        one.id,
        one.action,
        one.state,
        told(one.details, rules),
        f"{one.done:,}{of}{skipped}",
        scrubbed(one.error, rules),
        one.actor,
        one.started_at,
        one.done,
        one.skipped,
        one.total,
    )


FIRST = ("destination", "from", "status", "to", "reason")
"""What is said first of an operation or an action."""


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
