"""Write documents to Meilisearch: a request is a task, and one refused document fails the whole task.

The others are sent again without it. Adding to a missing index creates it, so an index that was created that
way is deleted again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus

from msgspec import json

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.errors import shorten
from relaybox.search.change import BUILDING
from relaybox.search.engine import Change, Write, encode_changes, halves, parts_of
from relaybox.search.http import Reply
from relaybox.search.meilisearch.server import NAME, Error, Server, Task, enqueued, error_of, path_of
from relaybox.sinks.deadline import no_answer
from relaybox.sinks.sink import DELIVERED, Answer, answer_of

AT_ONCE = 8
"""Requests at a time for one write."""
KNOWN = 10_000
"""Indexes with a remembered creation time."""

LARGEST_BODY = 32 * 1024 * 1024
"""Bytes of a request; a server takes 100 MiB by default."""
LONGEST_ID = 511

_NDJSON = "application/x-ndjson"
_NAMED = re.compile(r"(?:identifier|with the id:) `\"?([^`\"]+)\"?`")


class Writer:
    """Writes documents with their id under ``id_field``; ``creates``: writes may create the live index."""

    def __init__(self, server: Server, id_field: str, *, creates: bool) -> None:
        self._server = server
        self._id_field = id_field
        self._creates = creates
        self._created: dict[str, str] = {}
        """When the indexes were created that are known to have existed before."""

    def remember(self, found: Mapping[str, str]) -> None:
        """Remember when these indexes were created: no later write has created them."""
        if len(self._created) > KNOWN:
            self._created.clear()
        self._created |= found

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes; return an answer for each when its task has finished."""
        path_of(index)
        end = self._server.end()
        answers: dict[int, Answer] = {}
        writes = encode_changes(changes, _encode, answers)
        requests = [
            part
            for deletes in (False, True)
            for part in parts_of([write for write in writes if write.deletes is deletes], LARGEST_BODY)
        ]
        while requests:
            some, requests = requests[:AT_ONCE], requests[AT_ONCE:]
            for left in await asyncio.gather(*(self._settle(index, each, answers, end) for each in some)):
                requests += left
        return [answers[at] for at in range(len(changes))]

    async def _settle(
        self, index: str, writes: Sequence[Write], answers: dict[int, Answer], end: float
    ) -> Sequence[Sequence[Write]]:
        """Answer what one request settles; return the writes to send again, in other requests."""
        try:
            answer, error = await self._send(index, writes, end)
            divides = error.code == "payload_too_large" or error.may_be_of_document
            if isinstance(answer, Reject | Retry) and len(writes) > 1 and divides:
                named = _NAMED.search(error.message)
                guilty = {write.at for write in writes if named and write.id == named[1]}
                answers.update(dict.fromkeys(guilty, answer))
                return halves([write for write in writes if write.at not in guilty])
        except Exception as raised:
            # Parallel requests go on, and their answers must not be lost.
            answer = answer_of(raised)
        answers.update((write.at, answer) for write in writes)
        return ()

    async def _send(self, index: str, writes: Sequence[Write], end: float) -> tuple[Answer, Error]:
        """Send a request and wait for its task; return the answer, and the error if there is one."""
        reply = await self._post(f"{path_of(index)}/documents", writes, end)
        if not reply.ok:
            failure, error = self._server.failed(reply), _of_some(reply)
            if isinstance(failure, Reject) and not error.code:
                # The request was refused before any document was read.
                raise Unavailable(failure.reason)
            return failure, error
        task = await self._server.tasks.finished(enqueued(reply), end)
        failed, error = self._server.tasks.failure(task), task.error or Error()
        if not writes[0].deletes and (failed is None or error.of_index or error.of_document):
            exists = await self._check_index(index, task)
            if failed is None and not exists:
                # A parallel request found that these writes had created the index, and deleted it with them.
                raise self._missing(index)
        return failed or DELIVERED, error

    async def _post(self, path: str, writes: Sequence[Write], end: float) -> Reply:
        sent = [write.sent for write in writes]
        try:
            async with asyncio.timeout_at(end):
                if writes[0].deletes:
                    body = b"[%b]" % b",".join(sent)
                    return await self._server.request("POST", f"{path}/delete-batch", body)
                key = {"primaryKey": self._id_field}
                body = b"\n".join(sent)
                return await self._server.request("POST", path, body, content_type=_NDJSON, params=key)
        except TimeoutError:
            raise no_answer(self._server.where, self._server.timeout) from None

    async def _check_index(self, index: str, task: Task) -> bool:
        """Return True if the index exists. Raise ``Unavailable`` if it is not as configured."""
        found = await self._server.index(index)
        if found is None:
            return False
        if self.was_made_by(task, index, found.created_at):
            await self._server.drop(index)
            raise self._missing(index)
        key = found.primary_key
        if key is not None and key != self._id_field:
            what = f"the primary key of the index {index!r} on {self._server.where}"
            fix = "set id_field, or create the index again"
            raise Unavailable(f"{what} is {key!r}, not {self._id_field!r}: {fix}")
        return True

    def _missing(self, index: str) -> Unavailable:
        return Unavailable(f"the index {index!r} does not exist on {self._server.where}; create it")

    def was_made_by(self, task: Task, index: str, created: datetime) -> bool:
        """True if the task created the index by adding to it, although it should not."""
        if self._creates and not index.endswith(BUILDING):
            return False
        # Clocks may be set back, so they do not decide about an index that was seen before.
        if created.isoformat() == self._created.get(index):
            return False
        if task.started_at is None or task.finished_at is None:
            return False
        # Tasks run one at a time, so no other can have created it meanwhile.
        return task.started_at <= created <= task.finished_at


def _of_some(reply: Reply) -> Error:
    """Return the error if it is about some of the documents, or an empty one if about the whole request."""
    if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Error(code="payload_too_large")
    error = error_of(reply)
    return error if error.of_document else Error()


def _encode(change: Change) -> bytes:
    if not is_id(change.id):
        raise Reject(
            f"{shorten(change.id)} is not an id for Meilisearch, which takes up to {LONGEST_ID} "
            "characters: letters a-z and A-Z, digits, - and _"
        )
    try:
        return json.encode(change.id if change.document is None else dict(change.document))
    except (TypeError, ValueError, RecursionError) as error:
        raise Reject(f"the document is not valid JSON: {error}") from None


def is_id(text: str) -> bool:
    """True if Meilisearch accepts the text as the id of a document."""
    return len(text) <= LONGEST_ID and NAME.fullmatch(text) is not None
