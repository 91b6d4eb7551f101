"""Format numbers, durations and sizes for pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote

from relaybox.core.text import largest
from relaybox.core.values import mask_url

NOTHING = "–"
GAP = "\N{NO-BREAK SPACE}"

_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def number(value: float | None) -> str:
    """Return a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def compact(value: float) -> str:
    """Return a number for an axis, such as ``1.5k``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Return a duration in its largest unit, such as ``3 min``."""
    if seconds is None:
        return NOTHING
    count, unit = largest(seconds)
    return f"{count}{GAP}{unit}"


def lag(seconds: float | None) -> str:
    """Return a duration with two or three digits, such as ``42 ms`` or ``1.3 s``."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.3g}{GAP}ms"
    return f"{seconds:.2g}{GAP}s" if seconds < 10 else duration(seconds)


def rate(per_second: float | None) -> str:
    """Return a rate, such as ``12/s``."""
    if per_second is None:
        return NOTHING
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.2g}/s" if per_second else "0/s"


def size(count: int | None) -> str:
    """Return a number of bytes, such as ``1.5 KiB``."""
    if count is None:
        return NOTHING
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.3g}{GAP}{name}"
    return f"{count}{GAP}B"


def ago(moment: datetime, now: datetime) -> str:
    """Return the distance of a moment, such as ``in 3 min`` or ``3 min ago``."""
    distance = (moment - now).total_seconds()
    return f"in {duration(distance)}" if distance > 0 else f"{duration(-distance)} ago"


def spelled(moment: datetime) -> str:
    """Return a moment in UTC for people."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def machine(moment: datetime) -> str:
    """Return a moment for a ``datetime`` attribute in HTML."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def place(sink: str) -> str:
    """Return the scheme and host of a sink; the rest of its address may be secret."""
    return re.sub(r"(//[^/]*).*", r"\1", mask_url(sink).partition("?")[0], flags=re.DOTALL)


def segment(text: str) -> str:
    """Quote a text as one segment of a path."""
    return quote(text, safe="")


def shortened(text: str | None, length: int = 120) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
