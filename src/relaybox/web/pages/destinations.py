"""``/destinations`` and one of them: health, charts, settings, and what an operator can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.web import show
from relaybox.web.charts import charts
from relaybox.web.pages.health import row, rows
from relaybox.web.pages.overview import PERIODS, chosen_period
from relaybox.web.templating import error, page


async def destinations(request: Request) -> Response:
    """Every destination that is configured, or has rows."""
    admin = request.state.admin
    every = rows(await admin.stats(), dict(await admin.destinations()))
    troubled = sum(one.health.mood in ("warn", "bad") for one in every)
    spoken = f"{troubled} of {show.plural(len(every), 'destination')} in trouble"
    return page(request, "destinations.html", rows=every, spoken=spoken)


async def destination(request: Request) -> Response:
    """All about one."""
    admin = request.state.admin
    name = request.path_params["name"]
    configured = dict(await admin.destinations())
    stats = await admin.stats()
    found = next((one for one in stats.destinations if one.name == name), None)
    if found is None:
        return error(request, 404, "No such destination", f"None is called {show.shortened(name)!r}.")
    period = chosen_period(request)
    series = await admin.series(PERIODS[period].hours, name)
    return page(
        request,
        "destination.html",
        one=row(found, configured.get(name)),
        charts=charts(series, PERIODS[period].hours),
        settings=list(_settings(configured[name])) if name in configured else [],
        others=sorted(one for one, about in configured.items() if one != name and not about.handed_over),
        periods=PERIODS.items(),
        period=period,
        label=PERIODS[period].label,
    )


def _settings(one: Destination) -> Iterator[tuple[str, str]]:
    """What is configured, without what is secret."""
    yield "Sink", show.place(one.sink)
    yield "Format", _word(one.format)
    yield (
        "Order",
        f"by {_word(one.ordering)}, a failed one {'blocks' if one.on_failed == 'block' else 'skips'} its key"
        if one.ordered
        else "none",
    )
    yield "Attempts", str(one.max_attempts)
    backoff = one.backoff
    yield "Backoff", f"{backoff.base:g} s × {backoff.factor:g} up to {show.duration(backoff.cap)}"
    yield "Timeout, lease", f"{one.timeout:g} s, {one.lease:g} s"
    yield "Concurrency, batch", f"{one.concurrency}, {one.batch_size}"
    yield "Rate limit", "none" if one.rate_limit is None else f"{one.rate_limit:g} a second"
    yield "Retention", show.duration(one.retention) if one.retention else "deleted when delivered"
    yield "Dead letters to", one.dead_letter or "nowhere"
    yield "Signed, authorized", f"{'yes' if one.secret else 'no'}, {'yes' if one.auth else 'no'}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "a function"
