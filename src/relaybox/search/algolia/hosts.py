"""The client of an Algolia application: its hosts in turn, its errors, and requests that run a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.search.algolia.application import Application
from relaybox.search.http import Client, Params, Reply
from relaybox.sinks.sink import clean

DOWN_SECONDS = 300.0
"""Seconds for which a failed host is asked last."""

_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.01, 1.0


class Hosts(Client):
    """The hosts of an application."""

    def __init__(self, application: Application, timeout: float) -> None:
        super().__init__(
            (*application.writing, *application.reading),
            timeout=timeout,
            headers={"X-Algolia-Application-Id": application.id, "X-Algolia-API-Key": application.key},
            ssl=application.ssl,
        )
        self.where = application.where
        self._application = application
        self._down: dict[str, float] = {}
        self._pause = _FIRST_PAUSE

    async def ask(
        self, method: str, path: str, body: Any = None, *, params: Params = None, reading: bool = False
    ) -> Reply:
        """Ask the hosts in turn, until one is reachable and does not answer 5xx."""
        bases = self._application.reading if reading else self._application.writing
        now = time.monotonic()
        in_turn = sorted(bases, key=lambda base: self._down.get(base, 0.0) > now)
        for base in in_turn:
            last = base is in_turn[-1]
            try:
                reply = await self.request(method, path, body, params=params, bases=[base])
                if reply.status < 500:
                    return reply
                self._down[base] = time.monotonic() + DOWN_SECONDS
                if last:
                    return reply
            except Unavailable as error:
                self._down[base] = time.monotonic() + DOWN_SECONDS
                # A host that took the request may still be working on it.
                if last or not isinstance(error, Unreachable):
                    raise
        raise AssertionError("an application has at least one host")

    async def json(self, method: str, path: str, body: Any = None, *, params: Params = None) -> Any:
        """Return the object that a host for reads answers with. Raise ``Unavailable`` if it is not one."""
        reply = await self.ask(method, path, body, params=params, reading=True)
        if not reply.ok:
            raise self.failed(reply)
        return object_of(reply)

    async def do(
        self, method: str, index: str, path: str, asked: Any = None, seconds: float | None = None
    ) -> None:
        """Change an index, and return when the task of that is done."""
        reply = await self.ask(method, path_of(index, path), asked)
        if not reply.ok:
            raise self.failed(reply)
        end = time.monotonic() + (self.timeout if seconds is None else seconds)
        await self.published(index, task_of(reply), end)

    async def published(self, index: str, task: int, end: float) -> None:
        """Wait until the task is done. The first check comes after half the time that the last task took."""
        begin, pause = time.monotonic(), self._pause
        while True:
            await asyncio.sleep(min(pause, max(end - time.monotonic(), 0.0)))
            status = await self.json("GET", path_of(index, f"/task/{task}"))
            if status.get("status") == "published":
                took = time.monotonic() - begin
                self._pause = min(max(took / 2, _SHORTEST_PAUSE), _LONGEST_PAUSE)
                return
            if "status" not in status:
                raise Unavailable(f"{self.where} tells nothing of a task: is it Algolia?")
            if time.monotonic() >= end:
                raise Unavailable(
                    f"{self.where} has taken task {task} of {index!r}, and not published it yet"
                )
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """Return the outcome of an answer other than 2xx."""
        if reply.status == 429:
            return Throttled(self.reason(reply), after=reply.after)
        if over_quota(reply):
            said = clean(said_in(reply))
            # Throttled, because deletes still work and an event that waits for space has not failed.
            return Throttled(f"{reply.where}: {reply.status}: {said}", after=reply.after)
        if reply.status in (400, 402) or reply.status >= 500:
            return Unavailable(self.reason(reply), after=reply.after)
        return super().failed(reply)


def path_of(index: str, path: str) -> str:
    """Return the path of an index, or of a part of it. Raise ``Reject`` if there can be no such index."""
    if index in ("", ".", "..", "*"):
        raise Reject(f"no index of Algolia can be called {index!r}")
    return f"/1/indexes/{quote(index, safe='')}{path}"


def object_of(reply: Reply) -> Mapping[str, Any]:
    """Return the decoded answer. Raise ``Unavailable`` if it is not an object."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise Unavailable(f"{reply.where} answered in another way than Algolia does")
    return answer


def task_of(reply: Reply) -> int:
    """Return the id of the task that a request made."""
    task = object_of(reply).get("taskID")
    if not isinstance(task, int):
        raise Unavailable(f"{reply.where} answered {reply.status} without a task: is it Algolia?")
    return task


def said_in(reply: Reply) -> str:
    """Return the message of Algolia's error."""
    return str(error_in(reply).get("message", ""))


def over_quota(reply: Reply) -> bool:
    """True if the application is full."""
    return reply.status in (402, 403) and "quota" in said_in(reply).lower()


def error_in(reply: Reply) -> Mapping[str, Any]:
    """Return the fields of Algolia's error, or ``{}`` if something else answered."""
    return reply.read(dict[str, Any]) or {}
