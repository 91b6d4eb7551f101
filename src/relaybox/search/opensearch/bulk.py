"""Encode changes for OpenSearch's bulk requests, and interpret the answers.

A change carries the version of its event (``external_gte``). OpenSearch refuses an older one, so a conflict
means that a newer version is there. It keeps the versions of deleted documents for ``index.gc_deletes`` (60
seconds); after that only the order of deliveries guards them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, json

from relaybox.core.outcome import Reject, Throttled, Unavailable
from relaybox.search.engine import Change
from relaybox.search.http import Reply
from relaybox.sinks.http.status import classify
from relaybox.sinks.sink import DELIVERED, Answer, clean

LONGEST_ID = 512

GUARD = b'{"index":{"_id":"-","if_seq_no":9007199254740991,"if_primary_term":1}}\n{}\n'
"""An action that every index refuses. Deletes alone ignore ``require_alias``; beside it they create none."""

_TROUBLE = frozenset(["index_closed_exception", "invalid_index_name_exception", "security_exception"])
_OVERLOAD = frozenset(
    ["circuit_breaking_exception", "cluster_block_exception", "rejected_execution_exception"]
)
"""A cluster with full disks blocks writes but takes deletes, so a waiting event has not failed."""


def bulk_action_of(change: Change) -> bytes:
    """Encode the action, and the document if there is one. Raise ``Reject`` if no server takes it."""
    size = len(change.id.encode("utf-8", "surrogatepass"))
    if not 0 < size <= LONGEST_ID:
        raise Reject(f"the document's id has {size} bytes; OpenSearch takes 1 to {LONGEST_ID}")
    what = {"_id": change.id, "version": change.version, "version_type": "external_gte"}
    try:
        if change.document is None:
            return json.encode({"delete": what}) + b"\n"
        document = json.encode(change.document)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Reject(f"the document cannot be written as JSON: {error}") from None
    return json.encode({"index": what}) + b"\n" + document + b"\n"


class _Error(Struct, gc=False):
    type: str = ""
    reason: str | None = None
    caused_by: _Error | None = None


class Result(Struct, gc=False):
    """The result of one change."""

    status: int
    error: _Error | None = None


class _Bulk(Struct, gc=False):
    items: list[dict[str, Result]]


def results_of(reply: Reply, count: int) -> Sequence[Result]:
    """Return the result of each change. Raise ``Unavailable`` if the answer does not say."""
    bulk = reply.read(_Bulk) or _Bulk([])
    results = [result for entry in bulk.items for result in entry.values()]
    if len(results) != count:
        raise Unavailable(f"{reply.where} answered a bulk request in another way than OpenSearch does")
    return results


def answer_to(result: Result, where: str) -> Answer:
    """Return the answer for one change; deleting a missing document is not an error."""
    error = result.error
    if error is None or error.type == "version_conflict_engine_exception":
        return DELIVERED
    reason = f"{where} refuses it: {result.status}: {clean(_reported(error))}"
    # Servers compatible with Elasticsearch prefix some names with "es_".
    kind = error.type.removeprefix("es_").removeprefix("open_search_")
    if kind in _TROUBLE or "no write index" in (error.reason or ""):
        return Unavailable(reason)
    return Throttled(reason) if kind in _OVERLOAD else classify(result.status, reason)


def _reported(error: _Error) -> str:
    parts = [error.type, error.reason]
    if error.caused_by is not None and error.caused_by.reason != error.reason:
        parts += [error.caused_by.reason]
    return ": ".join(filter(None, parts))
