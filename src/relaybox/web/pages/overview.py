"""``/``: whether everything flows, and since when not."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.operate.admin import Point, Series
from relaybox.operate.health import Health
from relaybox.operate.why import is_alive
from relaybox.web.charts import PERIODS, charts, chosen_period
from relaybox.web.pages.destinations import Mood, Row, rows
from relaybox.web.show import plural
from relaybox.web.templating import page


async def overview(request: Request) -> Response:
    """Rates, lag, backlog and every destination's state."""
    admin = request.state.admin
    period = chosen_period(request)
    stats = await admin.stats()
    series = await admin.series(PERIODS[period].hours)
    recent = series if period == "1h" else await admin.series(PERIODS["1h"].hours)
    health = await admin.health()
    every = rows(stats, dict(await admin.destinations()))
    mood, headline = _headline(health, every)
    return page(
        request,
        "overview.html",
        stats=stats,
        rows=every,
        mood=mood,
        headline=headline,
        problems=health.problems,
        alive=sum(map(is_alive, stats.relays)),
        charts=charts(series, PERIODS[period].hours),
        latest=latest(recent),
        delivered=sum(point.delivered for point in series.points) * series.step.total_seconds(),
        failed=sum(point.failed for point in series.points),
        periods=PERIODS.items(),
        period=period,
        label=PERIODS[period].label,
    )


def latest(series: Series) -> Point:
    """The newest step of time that is over: the one that runs has only a part of its numbers."""
    return series.points[-2] if len(series.points) > 1 else series.points[-1]


def _headline(health: Health, every: list[Row]) -> tuple[Mood, str]:
    troubled = [one for one in every if one.health.mood in ("warn", "bad")]
    if not health.ready:
        return "bad", "Deliveries do not flow as they should."
    if troubled:
        verb = "needs" if len(troubled) == 1 else "need"
        return "warn", f"{len(troubled)} of {plural(len(every), 'destination')} {verb} attention."
    if not every:
        return "", "Nothing is configured yet."
    return "good", "Everything flows." if len(every) == 1 else f"All {len(every)} destinations are healthy."
