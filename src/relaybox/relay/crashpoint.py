"""Named crash points: moments of a relay's work at which a test kills the process.

Each is right before or after an effect that other processes can see. Outside tests it costs a function call.
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
    """Call the watcher, if there is one, with the point that the work has reached."""
    if _watcher is not None:
        _watcher(point)


def watch(watcher: Callable[[CrashPoint], None] | None) -> None:
    """Call ``watcher`` at every point from now on; None removes it."""
    global _watcher
    _watcher = watcher
