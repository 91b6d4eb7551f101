"""The client of one Meilisearch server: its errors, its indexes, and its tasks.

A request that changes an index only queues a task; one poller asks about all awaited tasks.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from http import HTTPStatus
from typing import Any

from msgspec import Struct

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable
from relaybox.errors import shorten
from relaybox.search.change import BUILDING
from relaybox.search.engine import pages
from relaybox.search.http import Client, Reply
from relaybox.sinks.http.status import classify
from relaybox.sinks.sink import clean

SHORTEST_PAUSE, LONGEST_PAUSE = 0.004, 0.1
"""Seconds between polls; they double while nothing finishes."""
AT_A_TIME = 200
"""Tasks in one poll, which lists them in its URL."""
BUSY_PAUSE = 1.0
"""Seconds to the next poll if an overloaded server does not say."""

_FINISHED = frozenset(["succeeded", "failed", "canceled"])
_BUSY = frozenset([HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE])
_FULL = frozenset(["no_space_left_on_device", "database_size_limit_reached"])
_SERVERS_TROUBLE = _FULL.union(
    ["index_not_found", "index_primary_key_already_exists", "io_error", "too_many_open_files"]
)
_OF_DOCUMENTS = ("invalid_document_", "missing_document_", "document_", "invalid_vector", "malformed_payload")


class Error(Struct):
    """Why Meilisearch refused something."""

    message: str = ""
    code: str = ""
    type: str = ""

    @property
    def of_document(self) -> bool:
        """True if a document is at fault, and the others would be accepted without it."""
        return self.code.startswith(_OF_DOCUMENTS)

    @property
    def of_index(self) -> bool:
        """True if the index has another primary key."""
        return self.code == "index_primary_key_already_exists"

    @property
    def may_be_of_document(self) -> bool:
        """True if a document may be at fault, as far as this code tells."""
        may_be = self.type in ("invalid_request", "internal") and self.code not in _SERVERS_TROUBLE
        return self.of_document or may_be


class Task(Struct, rename="camel"):
    """The fields of a task that are used here."""

    uid: int
    status: str
    error: Error | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class _Listed(Struct):
    results: list[Task]


def error_of(reply: Reply) -> Error:
    """Return the error of an answer, or an empty one if something else answered."""
    return reply.read(Error) or Error()


def enqueued(reply: Reply) -> int:
    """Return the id of the task that a request made."""
    uid = (reply.read(dict[str, Any]) or {}).get("taskUid")
    if type(uid) is not int:
        raise Unavailable(f"{reply.where} answered {reply.status} without a task: is it Meilisearch?")
    return uid


class Tasks:
    """Waits for the tasks of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[int, asyncio.Future[Task]] = {}
        self._seen: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def finished(self, uid: int, end: float) -> Task:
        """Return the finished task. Raise ``Unavailable`` if it has not finished by ``end``."""
        if self._poller is None or self._poller.done() or self._poller.get_loop() is not _loop():
            # Tasks that were awaited in another loop ended with it.
            self._waiting, self._changed = {}, asyncio.Event()
            self._poller = asyncio.create_task(self._poll())
        future: asyncio.Future[Task] = _loop().create_future()
        self._waiting[uid] = future
        self._changed.set()
        try:
            async with asyncio.timeout_at(end):
                return await future
        except TimeoutError:
            status = self._seen.get(uid, "enqueued")
            reason = f"{self._client.where}: task {uid} is still {status} after {self._client.timeout:g}s"
            raise Unavailable(reason) from None
        finally:
            self._waiting.pop(uid, None)
            self._seen.pop(uid, None)
            if not self._waiting:
                self._changed.set()

    def failure(self, task: Task) -> Retry | Reject | Unavailable | None:
        """Return the outcome of a task that failed, or None if it succeeded."""
        if task.status == "succeeded":
            return None
        if task.status == "canceled" or task.error is None:
            return Retry(f"{self._client.where}: task {task.uid} was {task.status}")
        what = f"task {task.uid} failed"
        if task.error.of_document:
            return Reject(self._reported(task.error, what))
        return self.trouble(task.error, what) or Retry(self._reported(task.error, what))

    def trouble(self, error: Error, what: str) -> Unavailable | None:
        """Return ``Unavailable`` if the server or its settings are at fault, or None."""
        if error.code in _FULL:
            # Throttled, because deletes may still work and an event that waits for space has not failed.
            return Throttled(self._reported(error, what))
        if error.code in _SERVERS_TROUBLE or error.type == "system":
            return Unavailable(self._reported(error, what))
        return None

    def _reported(self, error: Error, what: str) -> str:
        return f"{self._client.where}: {what}: {clean(error.message)} ({error.code})"

    async def close(self) -> None:
        """Stop polling, and fail what is still awaited."""
        poller, self._poller = self._poller, None
        if poller is None or poller.get_loop() is not _loop():
            return
        poller.cancel()
        await asyncio.wait([poller])
        self._fail(Retry(f"{self._client.where} was given up: the sink is closed"))

    async def _poll(self) -> None:
        pause = SHORTEST_PAUSE
        try:
            while self._waiting:
                self._changed.clear()
                if await self._interrupted(pause):
                    await asyncio.sleep(SHORTEST_PAUSE)
                    pause = SHORTEST_PAUSE
                pause = SHORTEST_PAUSE if await self._look() else min(2 * pause, LONGEST_PAUSE)
        except Exception as error:
            self._fail(error)

    async def _interrupted(self, pause: float) -> bool:
        """True if a task was added, or the last one left, before the pause was over."""
        try:
            async with asyncio.timeout(pause):
                return await self._changed.wait()
        except TimeoutError:
            return False

    async def _look(self) -> bool:
        """Poll once; return True if any task has finished."""
        finished = False
        for some in pages(sorted(self._waiting), AT_A_TIME):
            params = {"uids": ",".join(map(str, some)), "limit": str(len(some))}
            reply = await self._client.request("GET", "/tasks", params=params)
            if reply.status in _BUSY:
                # The tasks go on; sending them again would add to the load.
                after = BUSY_PAUSE if reply.after is None else max(reply.after, LONGEST_PAUSE)
                await asyncio.sleep(min(after, self._client.timeout))
                return finished
            if not reply.ok:
                failure = classify(reply.status, self._client.reason(reply), reply.after)
                # This failure says nothing about the tasks.
                raise failure if isinstance(failure, Unavailable) else Unavailable(failure.reason)
            listed = reply.read(_Listed)
            if listed is None:
                raise Unavailable(f"{reply.where} answered without its tasks: is it Meilisearch?")
            found = {task.uid: task for task in listed.results}
            for uid in some:
                finished |= self._tell(uid, found.get(uid))
        return finished

    def _tell(self, uid: int, task: Task | None) -> bool:
        future = self._waiting.get(uid)
        if future is None or future.done():
            return False
        if task is None:
            future.set_exception(Retry(f"{self._client.where} knows nothing of its task {uid} any more"))
        elif task.status in _FINISHED:
            future.set_result(task)
        else:
            self._seen[uid] = task.status
            return False
        return True

    def _fail(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


NAME = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)
"""A name of an index, or an id of a document."""


class Index(Struct, rename="camel"):
    """The fields of an index that are used here."""

    created_at: datetime
    primary_key: str | None


class Server(Client):
    """One server; a request that changes an index has ended when its task has finished."""

    def __init__(self, base: str, *, key: str | None, **options: Any) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__([base], headers=headers, **options)
        self.tasks = Tasks(self)

    def end(self) -> float:
        """Return the end of a request that begins now, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.timeout

    def failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """Return the outcome of an answer other than 2xx; its code tells if the server is in trouble."""
        return self.tasks.trouble(error_of(reply), str(reply.status)) or super().failed(reply)

    async def do(self, method: str, path: str, body: Any = None, *, unless: str | None = None) -> None:
        """Run a task; ``unless`` is the code of a failure that counts as success."""
        reply = await self.request(method, path, body)
        if not reply.ok:
            if error_of(reply).code == unless:
                return
            raise self.failed(reply)
        task = await self.tasks.finished(enqueued(reply), self.end())
        failure = self.tasks.failure(task)
        if failure is not None and (task.error is None or task.error.code != unless):
            raise failure

    async def index(self, name: str) -> Index | None:
        """Return an index, or None if it does not exist."""
        reply = await self.request("GET", path_of(name))
        if reply.status == HTTPStatus.NOT_FOUND and error_of(reply).code == "index_not_found":
            return None
        if reply.status == HTTPStatus.FORBIDDEN and name.endswith(BUILDING):
            # A key for the live index alone does not see a build index, and cannot build one either.
            return None
        if not reply.ok:
            raise self.failed(reply)
        index = reply.read(Index)
        if index is None:
            raise Unavailable(f"{reply.where} tells nothing of an index: is it Meilisearch?")
        return index

    async def drop(self, name: str) -> None:
        """Delete an index, if it exists."""
        await self.do("DELETE", path_of(name), unless="index_not_found")

    async def close(self) -> None:
        """Close the connections, and stop waiting for tasks."""
        await self.tasks.close()
        await super().close()


def path_of(index: str) -> str:
    """Return the path of an index. Raise ``Reject`` if no index can have that name."""
    if not NAME.fullmatch(index):
        raise Reject(
            f"{shorten(index)} is not an index for Meilisearch: it takes letters a-z A-Z, digits, - and _"
        )
    return f"/indexes/{index}"
