"""Meilisearch: documents to add and ids to delete become tasks; a change is done when its task succeeds.

One refused document fails its whole task, so the others are sent again without it. Adding to a missing index
creates it; an index that was created that way is deleted again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any

from msgspec import Struct, json

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.core.values import mask_url
from relaybox.errors import ConfigError, shorten
from relaybox.search.change import BUILDING, SEARCH_OPTIONS
from relaybox.search.engine import TROUBLE, Change, Item, encode_changes, halves, parts_of
from relaybox.search.http import Client, Reply
from relaybox.search.meilisearch.tasks import Error, Task, Tasks, enqueued, error_of
from relaybox.sinks.broker import TLS_OPTIONS, parse_address, tls_context
from relaybox.sinks.sink import DELIVERED, Answer, answer_of

PORT = 7700
PAGE = 1000
AT_ONCE = 8
"""Requests at a time for one write."""
KNOWN = 10_000
"""Indexes with a remembered creation time."""
SWAPS = 2
"""Tries of a swap that has no visible effect."""

LARGEST_BODY = 32 * 1024 * 1024
"""Bytes of a request; a server takes 100 MiB by default."""
LONGEST_ID = 511

_NDJSON = "application/x-ndjson"
_NAME = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)
_NAMED = re.compile(r"(?:identifier|with the id:) `\"?([^`\"]+)\"?`")


class _Index(Struct, rename="camel"):
    created_at: datetime
    primary_key: str | None


class MeilisearchEngine:
    """One Meilisearch server. Raises ``ConfigError`` if the URL or an option is wrong."""

    most = 1000

    def __init__(self, destination: Destination) -> None:
        encrypted = destination.scheme == "meilisearchs"
        known = {**SEARCH_OPTIONS, **(TLS_OPTIONS if encrypted else {})}
        address = parse_address(destination, PORT, known)
        if len(address.hosts) > 1:
            setting = f"destination {destination.name!r}: sink = {mask_url(destination.sink)!r}"
            raise ConfigError(f"{setting} names more than one host; keep one")
        base = f"{'https' if encrypted else 'http'}://{address.netlocs[0]}"
        key = address.password or address.user
        secrets = (key,) if key else ()
        self._timeout = destination.timeout
        self._client = Client(
            [base],
            timeout=destination.timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            secrets=secrets,
            ssl=tls_context(address.options, destination) if encrypted else None,
        )
        self._tasks = Tasks(self._client, destination.timeout, secrets)
        self._id_field: str = address.options.get("id_field", "id")
        self._creates: bool = address.options.get("create_index", False)
        self._created: dict[str, str] = {}
        """When the indexes were created that ``present`` found."""
        self.where = self._client.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes; return an answer for each when its task has finished."""
        _path(index)
        end = self._end()
        answers: dict[int, Answer] = {}
        items = encode_changes(changes, _encode, answers)
        requests = [
            part
            for deletes in (False, True)
            for part in parts_of([item for item in items if item.deletes is deletes], LARGEST_BODY)
        ]
        while requests:
            some, requests = requests[:AT_ONCE], requests[AT_ONCE:]
            for left in await asyncio.gather(*(self._settle(index, each, answers, end) for each in some)):
                requests += left
        return [answers[at] for at in range(len(changes))]

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with its time of creation."""
        asked = await asyncio.gather(*map(self._index, names))
        found = {
            name: index.created_at.isoformat() for name, index in zip(names, asked, strict=True) if index
        }
        if len(self._created) > KNOWN:
            self._created.clear()
        self._created |= found
        return found

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index with the key and settings of ``like``. Raise ``Retry`` if it exists."""
        path = _path(name)
        key, settings = self._id_field, {}
        if like is not None:
            key = (await self._json("GET", _path(like)))["primaryKey"] or key
            settings = await self._json("GET", f"{_path(like)}/settings")
            _check_copied(like, settings)
        await self._do("POST", "/indexes", {"uid": name, "primaryKey": key})
        if not settings:
            return
        try:
            await self._do("PATCH", f"{path}/settings", settings)
        except TROUBLE:
            with suppress(*TROUBLE):
                await self.drop(name)
            raise

    async def replace(self, live: str, fresh: str) -> None:
        """Swap the two, and delete the old index, which is then called ``fresh``."""
        if not await self.present([live]):
            await self.create(live)
        await self._swap(live, fresh)
        await self.drop(fresh)

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        await self._do("DELETE", _path(name), unless="index_not_found")

    async def refresh(self, index: str) -> None:
        """Do nothing: writes are visible when their task has succeeded."""

    async def count(self, index: str) -> int:
        """Return the number of documents."""
        count: int = (await self._json("GET", f"{_path(index)}/stats"))["numberOfDocuments"]
        return count

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the documents with these ids that exist."""
        possible = [each for each in dict.fromkeys(ids) if _is_id(each)]
        found: dict[str, Mapping[str, Any]] = {}
        for begin in range(0, len(possible), PAGE):
            some = possible[begin : begin + PAGE]
            page = await self._fetch(index, {"ids": some, "limit": len(some)})
            found |= {str(document[self._id_field]): document for document in page["results"]}
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all documents. One may be missed if others are deleted meanwhile."""
        offset, total = 0, 1
        while offset < total:
            asked = {"fields": [self._id_field], "limit": PAGE, "offset": offset}
            page = await self._fetch(index, asked)
            if not page["results"]:
                return
            yield [str(document[self._id_field]) for document in page["results"]]
            offset, total = offset + len(page["results"]), page["total"]

    async def check(self) -> None:
        """Reach the server with its key. Raise ``Unavailable`` with the reason."""
        status = (await self._json("GET", "/health")).get("status")
        if status != "available":
            raise Unavailable(f"{self.where} says that it is {status!r}")
        await self._json("GET", "/indexes", params={"limit": "1"})

    async def close(self) -> None:
        """Close the connections, and stop waiting for tasks."""
        await self._tasks.close()
        await self._client.close()

    def _end(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _settle(
        self, index: str, items: Sequence[Item], answers: dict[int, Answer], end: float
    ) -> Sequence[Sequence[Item]]:
        """Answer what one request settles; return the items to send again, in other requests."""
        try:
            answer, error = await self._send(index, items, end)
            divides = error.code == "payload_too_large" or error.may_be_of_document
            if isinstance(answer, Reject | Retry) and len(items) > 1 and divides:
                named = _NAMED.search(error.message)
                guilty = {item.at for item in items if named and item.id == named[1]}
                answers.update(dict.fromkeys(guilty, answer))
                return halves([item for item in items if item.at not in guilty])
        except Exception as raised:
            # Parallel requests go on, and their answers must not be lost.
            answer = answer_of(raised)
        answers.update((item.at, answer) for item in items)
        return ()

    async def _send(self, index: str, items: Sequence[Item], end: float) -> tuple[Answer, Error]:
        """Send a request and wait for its task; return the answer, and the error if there is one."""
        reply = await self._post(f"{_path(index)}/documents", items, end)
        if not reply.ok:
            failure, error = self._failed(reply), _of_some(reply)
            if isinstance(failure, Reject) and not error.code:
                # The request was refused before any document was read.
                raise Unavailable(failure.reason)
            return failure, error
        task = await self._tasks.finished(enqueued(reply), end)
        failed, error = self._tasks.failure(task), task.error or Error()
        if not items[0].deletes and (failed is None or error.of_index or error.of_document):
            exists = await self._check_index(index, task)
            if failed is None and not exists:
                # A parallel request found that these writes had created the index, and deleted it with them.
                raise self._missing(index)
        return failed or DELIVERED, error

    async def _post(self, path: str, items: Sequence[Item], end: float) -> Reply:
        sent = [item.sent for item in items]
        try:
            async with asyncio.timeout_at(end):
                if items[0].deletes:
                    body = b"[%b]" % b",".join(sent)
                    return await self._client.request("POST", f"{path}/delete-batch", body)
                key = {"primaryKey": self._id_field}
                body = b"\n".join(sent)
                return await self._client.request("POST", path, body, content_type=_NDJSON, params=key)
        except TimeoutError:
            raise Unavailable(f"no answer from {self.where} within {self._timeout:g}s") from None

    async def _check_index(self, index: str, task: Task) -> bool:
        """Return True if the index exists. Raise ``Unavailable`` if it is not as configured."""
        found = await self._index(index)
        if found is None:
            return False
        if self._was_made_by(task, index, found.created_at):
            await self.drop(index)
            raise self._missing(index)
        key = found.primary_key
        if key is not None and key != self._id_field:
            reason = (
                f"the primary key of the index {index!r} on {self.where} is {key!r}, not {self._id_field!r}"
            )
            raise Unavailable(f"{reason}: set id_field, or create the index again")
        return True

    def _missing(self, index: str) -> Unavailable:
        return Unavailable(f"the index {index!r} does not exist on {self.where}; create it")

    def _was_made_by(self, task: Task, index: str, created: datetime) -> bool:
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

    async def _index(self, name: str) -> _Index | None:
        reply = await self._client.request("GET", _path(name))
        if reply.status == HTTPStatus.NOT_FOUND and error_of(reply).code == "index_not_found":
            return None
        if reply.status == HTTPStatus.FORBIDDEN and name.endswith(BUILDING):
            # A key for the live index alone does not see a build index, and cannot build one either.
            return None
        if not reply.ok:
            raise self._failed(reply)
        index = reply.read(_Index)
        if index is None:
            raise Unavailable(f"{reply.where} tells nothing of an index: is it Meilisearch?")
        return index

    async def _swap(self, live: str, fresh: str) -> None:
        """Swap the two. Check the effect before another try, because a second swap would undo the first."""
        wanted = (await self.present([fresh])).get(fresh)
        if wanted is None:
            raise Unavailable(f"the index {fresh!r} does not exist on {self.where}")
        trouble = Unavailable(f"{self.where} has not swapped {live!r} and {fresh!r}")
        for _ in range(SWAPS):
            try:
                await self._do("POST", "/swap-indexes", [{"indexes": [live, fresh]}])
            except (Retry, Unavailable) as error:
                trouble = Unavailable(error.reason)
                # A swap may still be under way although its answer was lost.
                asked = {"types": "indexSwap", "statuses": "enqueued,processing"}
                for task in (await self._json("GET", "/tasks", params=asked))["results"]:
                    await self._tasks.finished(task["uid"], self._end())
            if (await self.present([live])).get(live) == wanted:
                return
        raise trouble

    async def _do(self, method: str, path: str, body: Any = None, *, unless: str | None = None) -> None:
        """Run a task; ``unless`` is the code of a failure that counts as success."""
        reply = await self._client.request(method, path, body)
        if not reply.ok:
            if error_of(reply).code == unless:
                return
            raise self._failed(reply)
        task = await self._tasks.finished(enqueued(reply), self._end())
        failure = self._tasks.failure(task)
        if failure is not None and (task.error is None or task.error.code != unless):
            raise failure

    def _failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """Return the outcome of an answer other than 2xx; its code tells if the server is in trouble."""
        return self._tasks.trouble(error_of(reply), str(reply.status)) or self._client.failed(reply)

    async def _fetch(self, index: str, asked: dict[str, Any]) -> Any:
        return await self._json("POST", f"{_path(index)}/documents/fetch", asked)

    async def _json(
        self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        reply = await self._client.request(method, path, body, params=params)
        if not reply.ok:
            raise self._failed(reply)
        return reply.json()


def _of_some(reply: Reply) -> Error:
    """Return the error if it is about some of the documents, or an empty one if about the whole request."""
    if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Error(code="payload_too_large")
    error = error_of(reply)
    return error if error.of_document else Error()


def _encode(change: Change) -> bytes:
    if not _is_id(change.id):
        raise Reject(
            f"{shorten(change.id)} is not an id for Meilisearch: it takes letters a-z A-Z, digits, - and _, "
            f"at most {LONGEST_ID} of them"
        )
    try:
        return json.encode(change.id if change.document is None else dict(change.document))
    except (TypeError, ValueError, RecursionError) as error:
        raise Reject(f"the document is not valid JSON: {error}") from None


def _is_id(text: str) -> bool:
    return len(text) <= LONGEST_ID and _NAME.fullmatch(text) is not None


def _path(index: str) -> str:
    if not _NAME.fullmatch(index):
        raise Reject(
            f"{shorten(index)} is not an index for Meilisearch: it takes letters a-z A-Z, digits, - and _"
        )
    return f"/indexes/{index}"


def _check_copied(like: str, settings: Mapping[str, Any]) -> None:
    """Raise ``Unavailable`` if an embedder has a key: Meilisearch hides it, so it cannot be copied."""
    embedders: Mapping[str, Any] = settings.get("embedders") or {}
    for name, embedder in embedders.items():
        if embedder.get("apiKey"):
            raise Unavailable(
                f"the settings of the index {like!r} cannot be copied: its embedder {name!r} has an apiKey, "
                "which Meilisearch does not tell"
            )
