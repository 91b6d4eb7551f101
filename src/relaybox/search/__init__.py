"""Keep a search index in step with a database: backfill, reindex, reconcile.

Names load on first use: a relay imports the engines, and none of this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaybox.search._backfill import abackfill, backfill
    from relaybox.search._reconcile import areconcile, reconcile
    from relaybox.search._reindex import areindex, reindex
    from relaybox.search.results import Backfilled, Progress
    from relaybox.search.source import Source, load_source

__all__ = [
    "Backfilled",
    "Progress",
    "Source",
    "abackfill",
    "areconcile",
    "areindex",
    "backfill",
    "load_source",
    "reconcile",
    "reindex",
]


def __getattr__(name: str) -> Any:
    for home in ("results", "source", "_backfill", "_reconcile", "_reindex") if name in __all__ else ():
        if hasattr(module := import_module(f"{__name__}.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
