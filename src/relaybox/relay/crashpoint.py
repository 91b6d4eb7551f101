"""Named crash points: moments of a relay's work at which a test lets the process die.

Each is right before or after something that others can see. Outside tests one costs a function call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

CrashPoint: TypeAlias = Literal[
    "claim", "claimed", "send", "answered", "settle", "settled", "extend", "extended", "release", "released",
    "change circuit", "circuit changed",
]  # fmt: skip
CRASH_POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)

_watcher: Callable[[CrashPoint], None] | None = None


def reached(point: CrashPoint) -> None:
    """The work is at this point."""
    if _watcher is not None:
        _watcher(point)


def watch(watcher: Callable[[CrashPoint], None] | None) -> None:
    """Have ``watcher`` called at every point from now on; None: nobody."""
    global _watcher
    _watcher = watcher
