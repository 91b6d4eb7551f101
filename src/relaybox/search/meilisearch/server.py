"""The client of one Meilisearch server: its errors, its indexes, and requests that run a task."""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from http import HTTPStatus
from typing import Any

from msgspec import Struct

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.errors import shorten
from relaybox.search.change import BUILDING
from relaybox.search.http import Client, Reply
from relaybox.search.meilisearch.tasks import Tasks, enqueued, error_of

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
