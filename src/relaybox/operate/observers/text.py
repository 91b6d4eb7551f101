"""Numbers and texts as a person reads them in one line."""

from __future__ import annotations

_LONGEST = 300
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def span(seconds: float) -> str:
    """``12 ms``, ``1.5 s``, ``3 min 20 s``, ``2 h``: two units at most."""
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for size, unit in (*_UNITS, (1.0, "s")):
        whole, rest = divmod(rest, int(size))
        if whole:
            parts.append(f"{whole} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def one_line(text: str) -> str:
    """A text from outside, without what would break a line or move a cursor, and not too long."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 2 * _LONGEST])
    line = " ".join(printable.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
