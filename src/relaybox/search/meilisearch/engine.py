"""Meilisearch: changes go as documents to add and ids to delete; they are done when their tasks succeed.

A document that Meilisearch refuses fails the whole task it came with: the others are sent again without it.
Whatever is added to an index that does not exist creates it; one that was created so is deleted again.
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
from relaybox.errors import ConfigError
from relaybox.search.change import BUILDING, SEARCH_OPTIONS
from relaybox.search.engine import Change
from relaybox.search.http import Client, Reply
from relaybox.search.meilisearch.requests import WriteRequest, check_copied, is_id, path_of, requests_of
from relaybox.search.meilisearch.tasks import Error, Task, Tasks, enqueued, error_of
from relaybox.sinks.broker import TLS_OPTIONS, parse_address, tls_context
from relaybox.sinks.sink import DELIVERED, Answer, answer_of

PORT = 7700
PAGE = 1000
"""Documents in an answer."""
AT_ONCE = 8
"""Requests under way for one write."""
KNOWN = 10_000
"""Indexes of which it is kept when they were created."""
SWAPS = 2
"""Times that a swap is tried whose effect is not seen."""

_NDJSON = "application/x-ndjson"
_NAMED = re.compile(r"(?:identifier|with the id:) `\"?([^`\"]+)\"?`")


class _Index(Struct, rename="camel"):
    created_at: datetime
    primary_key: str | None


_decode_index = json.Decoder(_Index).decode


class MeilisearchEngine:
    """One Meilisearch server. Raises ``ConfigError`` where the URL or an option is wrong."""

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
        """When the indexes were created that somebody asked for."""
        self.where = self._client.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Do them all, and answer each when its task has finished."""
        path_of(index)
        end = self._end()
        answers: dict[int, Answer] = {}
        requests = requests_of(changes, answers)
        while requests:
            some, requests = requests[:AT_ONCE], requests[AT_ONCE:]
            for left in await asyncio.gather(*(self._settle(index, each, answers, end) for each in some)):
                requests += left
        return [answers[at] for at in range(len(changes))]

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Those of the indexes that exist, each with when it was created."""
        asked = await asyncio.gather(*map(self._index, names))
        found = {
            name: index.created_at.isoformat() for name, index in zip(names, asked, strict=True) if index
        }
        if len(self._created) > KNOWN:
            self._created.clear()
        self._created |= found
        return found

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Make an empty index with the primary key and settings of ``like``; ``Retry`` where it exists."""
        path = path_of(name)
        key, settings = self._id_field, {}
        if like is not None:
            key = (await self._json("GET", path_of(like)))["primaryKey"] or key
            settings = await self._json("GET", f"{path_of(like)}/settings")
            check_copied(like, settings)
        await self._do("POST", "/indexes", {"uid": name, "primaryKey": key})
        if not settings:
            return
        try:
            await self._do("PATCH", f"{path}/settings", settings)
        except (Retry, Reject, Unavailable):
            with suppress(Retry, Reject, Unavailable):
                await self.drop(name)
            raise

    async def replace(self, live: str, fresh: str) -> None:
        """Swap them, and delete the old one, which has the name ``fresh`` then."""
        if not await self.present([live]):
            await self.create(live)
        await self._swap(live, fresh)
        await self.drop(fresh)

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        await self._do("DELETE", path_of(name), unless="index_not_found")

    async def refresh(self, index: str) -> None:
        """What was written is visible: its task has succeeded."""

    async def count(self, index: str) -> int:
        """How many documents it has."""
        count: int = (await self._json("GET", f"{path_of(index)}/stats"))["numberOfDocuments"]
        return count

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """The documents that exist of these."""
        possible = [each for each in dict.fromkeys(ids) if is_id(each)]
        found: dict[str, Mapping[str, Any]] = {}
        for begin in range(0, len(possible), PAGE):
            some = possible[begin : begin + PAGE]
            page = await self._fetch(index, {"ids": some, "limit": len(some)})
            found |= {str(document[self._id_field]): document for document in page["results"]}
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """The ids of all documents. One may be missed where others are deleted meanwhile."""
        offset, total = 0, 1
        while offset < total:
            asked = {"fields": [self._id_field], "limit": PAGE, "offset": offset}
            page = await self._fetch(index, asked)
            if not page["results"]:
                return
            yield [str(document[self._id_field]) for document in page["results"]]
            offset, total = offset + len(page["results"]), page["total"]

    async def check(self) -> None:
        """Reach the server with its key; raises ``Unavailable`` with the reason."""
        status = (await self._json("GET", "/health")).get("status")
        if status != "available":
            raise Unavailable(f"{self.where} says that it is {status!r}")
        await self._json("GET", "/indexes", params={"limit": "1"})

    async def close(self) -> None:
        """Give up the connections, and whatever is waited for."""
        await self._tasks.close()
        await self._client.close()

    def _end(self) -> float:
        """When the time of what begins now is over, by the loop's clock."""
        return asyncio.get_running_loop().time() + self._timeout

    async def _settle(
        self, index: str, request: WriteRequest, answers: dict[int, Answer], end: float
    ) -> Sequence[WriteRequest]:
        """Answer what one request tells; the rest is to be sent in others."""
        try:
            answer, error = await self._send(index, request, end)
            if isinstance(answer, Reject | Retry) and len(request.items) > 1 and _divides(error):
                return _divided(request, error, answer, answers)
        except Exception as raised:
            # Those beside it go on, and what they do is not to be lost.
            answer = answer_of(raised)
        answers.update((item.at, answer) for item in request.items)
        return ()

    async def _send(self, index: str, request: WriteRequest, end: float) -> tuple[Answer, Error]:
        """What becomes of a request and its task, and the error if there is one."""
        reply = await self._post(f"{path_of(index)}/documents", request, end)
        if not reply.ok:
            failure, error = self._failed(reply), _of_some(reply)
            if isinstance(failure, Reject) and not error.code:
                # Nobody has looked at a document.
                raise Unavailable(failure.reason)
            return failure, error
        task = await self._tasks.finished(enqueued(reply), end)
        failed, error = self._tasks.failure(task), task.error or Error()
        if not request.deletes and (failed is None or error.of_index or error.of_document):
            exists = await self._check_index(index, task)
            if failed is None and not exists:
                # Another request has found that they had made it, and deleted it with what was added.
                raise self._missing(index)
        return failed or DELIVERED, error

    async def _post(self, path: str, request: WriteRequest, end: float) -> Reply:
        try:
            async with asyncio.timeout_at(end):
                if request.deletes:
                    return await self._client.request("POST", f"{path}/delete-batch", body=request.body)
                key = {"primaryKey": self._id_field}
                return await self._client.request(
                    "POST", path, body=request.body, content_type=_NDJSON, params=key
                )
        except TimeoutError:
            raise Unavailable(f"no answer from {self.where} within {self._timeout:g}s") from None

    async def _check_index(self, index: str, task: Task) -> bool:
        """Return whether the index exists.

        Raises ``Unavailable`` where it is not what it should be: no document is to blame then.
        """
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
            raise Unavailable(f"{reason}: set id_field, or make the index anew")
        return True

    def _missing(self, index: str) -> Unavailable:
        return Unavailable(f"the index {index!r} does not exist on {self.where}; create it")

    def _was_made_by(self, task: Task, index: str, created: datetime) -> bool:
        """Whether adding to it made it, which nobody wanted."""
        if self._creates and not index.endswith(BUILDING):
            return False
        # Clocks are set back at times: one that was there before is not judged by them.
        if created.isoformat() == self._created.get(index):
            return False
        if task.started_at is None or task.finished_at is None:
            return False
        # One task runs at a time: no other can have made it meanwhile.
        return task.started_at <= created <= task.finished_at

    async def _index(self, name: str) -> _Index | None:
        reply = await self._client.request("GET", path_of(name))
        if reply.status == HTTPStatus.NOT_FOUND and error_of(reply).code == "index_not_found":
            return None
        if reply.status == HTTPStatus.FORBIDDEN and name.endswith(BUILDING):
            # A key that is for the live index alone: nothing is built with it, either.
            return None
        if not reply.ok:
            raise self._failed(reply)
        try:
            return _decode_index(reply.body)
        except (ValueError, RecursionError):
            raise Unavailable(f"{reply.where} tells nothing of an index: is it Meilisearch?") from None

    async def _swap(self, live: str, fresh: str) -> None:
        """Swap them, whatever becomes of the answer: to swap once more would undo it."""
        wanted = (await self.present([fresh])).get(fresh)
        if wanted is None:
            raise Unavailable(f"the index {fresh!r} does not exist on {self.where}")
        trouble = Unavailable(f"{self.where} has not swapped {live!r} and {fresh!r}")
        for _ in range(SWAPS):
            try:
                await self._do("POST", "/swap-indexes", [{"indexes": [live, fresh]}])
            except (Retry, Unavailable) as error:
                trouble = Unavailable(error.reason)
                await self._finish_swaps()
            if (await self.present([live])).get(live) == wanted:
                return
        raise trouble

    async def _finish_swaps(self) -> None:
        """Wait for those that are under way."""
        asked = {"types": "indexSwap", "statuses": "enqueued,processing"}
        for task in (await self._json("GET", "/tasks", params=asked))["results"]:
            await self._tasks.finished(task["uid"], self._end())

    async def _do(self, method: str, path: str, body: Any = None, *, unless: str | None = None) -> None:
        """Have a task done; ``unless`` is the code of a failure that is as good."""
        reply = await self._request(method, path, body)
        if not reply.ok:
            if error_of(reply).code == unless:
                return
            raise self._failed(reply)
        task = await self._tasks.finished(enqueued(reply), self._end())
        failure = self._tasks.failure(task)
        if failure is not None and (task.error is None or task.error.code != unless):
            raise failure

    def _failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """What an answer other than 2xx means: by its code where the server itself is in trouble."""
        return self._tasks.trouble(error_of(reply), str(reply.status)) or self._client.failed(reply)

    async def _fetch(self, index: str, asked: dict[str, Any]) -> Any:
        return await self._json("POST", f"{path_of(index)}/documents/fetch", asked)

    async def _json(
        self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        reply = await self._request(method, path, body, params)
        if not reply.ok:
            raise self._failed(reply)
        return reply.json()

    async def _request(
        self, method: str, path: str, body: Any, params: Mapping[str, str] | None = None
    ) -> Reply:
        encoded = None if body is None else json.encode(body)
        return await self._client.request(method, path, body=encoded, params=params)


def _of_some(reply: Reply) -> Error:
    """What is wrong with some of what was sent; nothing where it is with the whole request."""
    if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Error(code="payload_too_large")
    error = error_of(reply)
    return error if error.of_document else Error()


def _divides(error: Error) -> bool:
    """Whether some of what was sent may be taken without the rest."""
    return error.code == "payload_too_large" or error.may_be_of_document


def _divided(
    request: WriteRequest, error: Error, answer: Answer, answers: dict[int, Answer]
) -> list[WriteRequest]:
    """Answer the document that the error names, if it does; the others go in halves."""
    named = _NAMED.search(error.message)
    guilty = [item for item in request.items if named and item.id == named[1]]
    answers.update((item.at, answer) for item in guilty)
    return request.without(guilty).halves()
