"""Keep a search index in step with a database: backfill, reindex, reconcile."""

from relaybox.indexing.backfill import abackfill, backfill
from relaybox.indexing.backfilled import Backfilled, Progress
from relaybox.indexing.reconcile import areconcile, reconcile
from relaybox.indexing.reindex import areindex, reindex
from relaybox.indexing.source import Source, load_source

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
