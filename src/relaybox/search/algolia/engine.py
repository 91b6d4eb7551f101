"""Algolia: batches of its REST API, each done when its task is published.

A document replaces the record with its id. With ``version_field`` it is a partial update instead, which
Algolia ignores if the record has a newer version. Attributes missing in the document then stay in the record,
and deletes are not guarded.

Algolia refuses a whole batch for one bad record; that record is found, and the others are written without it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from msgspec import json

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.search.algolia.application import Application, application_of
from relaybox.search.change import BUILDING
from relaybox.search.engine import TROUBLE, Change, Item, encode_changes, halves, parts_of
from relaybox.search.http import Client, Reply
from relaybox.sinks.sink import DELIVERED, Answer, clean

MOST = 1000
LARGEST_BODY = 10_000_000
"""Bytes of a batch, as Algolia advises; one record may be larger."""
DOWN_SECONDS = 300.0
"""Seconds for which a failed host is asked last."""
MOVE_SECONDS = 300.0
"""Seconds for a move, which is slower than a batch."""
MARK = "relaybox-index"
"""The key in ``userData`` of an index's settings; a later index of the same name has another value."""

_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.01, 1.0
_OF_INDEX = re.compile(r"index ?name", re.IGNORECASE)
_BAD = re.compile(r"[Rr]ecord at the position ([0-9]+)(?: objectID=(.*))? is too big", re.DOTALL)


def open_engine(destination: Destination) -> AlgoliaEngine:
    """Open the engine of an ``algolia://`` destination."""
    return AlgoliaEngine(application_of(destination), destination.timeout)


class AlgoliaEngine:
    """The indexes of an Algolia application."""

    most = MOST

    def __init__(self, application: Application, timeout: float) -> None:
        self._application = application
        self._timeout = timeout
        self.where = application.where
        self._client = Client(
            (*application.writing, *application.reading),
            timeout=timeout,
            headers={"X-Algolia-Application-Id": application.id, "X-Algolia-API-Key": application.key},
            secrets=(application.key,),
            ssl=application.ssl,
        )
        self._down: dict[str, float] = {}
        self._pause = _FIRST_PAUSE

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Return an answer for each change, once all tasks are published."""
        answers: dict[int, Answer] = {}
        actions = encode_changes(changes, self._packed, answers)
        tasks = await self._send(index, actions, answers)
        end = time.monotonic() + self._timeout
        trouble: Answer | None = None
        for task, part in tasks:
            if trouble is None:
                try:
                    await self._published(index, task, end)
                except TROUBLE as error:
                    trouble = error
            answers.update((action.at, trouble or DELIVERED) for action in part)
        return [answers[at] for at in range(len(changes))]

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with its mark, which is empty if Relaybox did not create it.

        Ignore a build index without a mark. Algolia created it from a late write to one that was moved or
        deleted; relays that accepted it would write to it forever.
        """
        found = await asyncio.gather(*(self._user_data(name) for name in names))
        marks = {
            name: str(data.get(MARK, "")) for name, data in zip(names, found, strict=True) if data is not None
        }
        return {name: mark for name, mark in marks.items() if mark or not name.endswith(BUILDING)}

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index; with ``like``, replace any of that name and copy all but the records."""
        kept: Mapping[str, Any] = {}
        if like is not None:
            await self.drop(name)
            scope = ["settings", "synonyms", "rules"]
            asked = {"operation": "copy", "destination": name, "scope": scope}
            await self._do("POST", like, "/operation", asked)
            kept = await self._user_data(name) or {}
        await self._do("PUT", name, "/settings", {"userData": {**kept, MARK: uuid4().hex}})

    async def replace(self, live: str, fresh: str) -> None:
        """Move ``fresh`` over ``live``. Algolia reports no missing index, so check before and after."""
        mark = (await self.present([fresh])).get(fresh)
        if mark is None:
            raise Unavailable(f"the index {fresh!r} does not exist on {self.where}; {live!r} stays as it is")
        asked = {"operation": "move", "destination": live}
        await self._do("POST", fresh, "/operation", asked, max(self._timeout, MOVE_SECONDS))
        if (await self.present([live])).get(live) != mark:
            raise Unavailable(f"{self.where} did not move {fresh!r} to {live!r}; was it deleted meanwhile?")

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        await self._do("DELETE", name, "", None)

    async def refresh(self, index: str) -> None:
        """Do nothing: writes are visible when their task is published."""

    async def count(self, index: str) -> int:
        """Return the number of records, from the list of all indexes."""
        listed = await self._read("GET", "/1/indexes")
        for item in listed["items"]:
            if item["name"] == index:
                return int(item["entries"])
        raise Unavailable(f"the index {index!r} does not exist on {self.where}")

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the records with these ids that exist, without the attributes that Relaybox added."""
        found: dict[str, Mapping[str, Any]] = {}
        for begin in range(0, len(ids), MOST):
            requests = [{"indexName": index, "objectID": id} for id in ids[begin : begin + MOST]]
            answer = await self._read("POST", "/1/indexes/*/objects", {"requests": requests})
            found |= {each["objectID"]: self._document(each) for each in answer["results"] if each}
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all records, a thousand at a time."""
        asked: dict[str, Any] = {"attributesToRetrieve": ["objectID"], "hitsPerPage": MOST}
        while True:
            page = await self._read("POST", _path(index, "/browse"), asked)
            if page["hits"]:
                yield [hit["objectID"] for hit in page["hits"]]
            if not page.get("cursor"):
                return
            asked["cursor"] = page["cursor"]

    async def check(self) -> None:
        """List the indexes, which needs a valid key. Raise ``Unavailable`` with the reason."""
        await self._read("GET", "/1/indexes?page=0&hitsPerPage=1")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _packed(self, change: Change) -> bytes:
        """Return the action for a batch. Raise ``Reject`` if Algolia cannot store the document."""
        if not change.id:
            raise Reject("the aggregate's id is empty, and an objectID must not be")
        if change.document is None:
            return json.encode({"action": "deleteObject", "body": {"objectID": change.id}})
        document, version = change.document, self._application.version_field
        if "objectID" in document and self._application.id_field != "objectID":
            fix = "leave it out, or set id_field = objectID"
            raise Reject(f"the document has an attribute objectID, which is Algolia's own; {fix}")
        if version is None:
            return json.encode({"action": "updateObject", "body": {**document, "objectID": change.id}})
        if version in document:
            raise Reject(
                f"the document has the attribute {version!r}, which is the version_field; rename one"
            )
        for name, value in document.items():
            if isinstance(value, Mapping) and "_operation" in value:
                raise Reject(f"the attribute {name!r} has a key _operation, which would be done, not kept")
        guard = {"_operation": "IncrementSet", "value": change.version}
        body = {**document, "objectID": change.id, version: guard}
        return json.encode({"action": "partialUpdateObject", "body": body})

    def _document(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        added = {self._application.version_field, "objectID"} - {self._application.id_field}
        return {name: value for name, value in record.items() if name not in added}

    async def _send(
        self, index: str, actions: Sequence[Item], answers: dict[int, Answer]
    ) -> Sequence[tuple[int, Sequence[Item]]]:
        """Send the actions; return the tasks of what Algolia took, and answer the rest."""
        tasks = []
        left = list(parts_of(actions, LARGEST_BODY))
        end = time.monotonic() + self._timeout
        while left:
            part = left.pop()
            body = b'{"requests":[%b]}' % b",".join([action.sent for action in part])
            try:
                if time.monotonic() > end:
                    raise Unavailable(f"{self.where} has not taken all within {self._timeout:g}s")
                reply = await self._ask("POST", _path(index, "/batch"), body)
                if reply.ok:
                    tasks.append((_task_of(reply), part))
                elif reply.status == 413 and len(part) > 1:
                    left += halves(part)
                elif reply.status in (400, 413) and _is_of_record(reply):
                    left += self._without_bad(reply, part, answers)
                elif _over_quota(reply) and len(part) > 1:
                    # Deletes free space and must not wait for it; some of the others may still fit.
                    deletes = [action for action in part if action.deletes]
                    fewer = deletes if 0 < len(deletes) < len(part) else part[: len(part) // 2]
                    left.append(fewer)
                    refused = self._failed(reply)
                    answers.update((action.at, refused) for action in part if action not in fewer)
                else:
                    raise self._failed(reply)
            except TROUBLE as error:
                # The application or the index is in trouble, so the rest would fail too.
                for action in (*part, *(each for more in left for each in more)):
                    answers[action.at] = error
                break
        return tasks

    def _without_bad(
        self, reply: Reply, part: Sequence[Item], answers: dict[int, Answer]
    ) -> list[Sequence[Item]]:
        """Answer the bad record of a refused batch; return what to try next."""
        bad = part[0] if len(part) == 1 else _named(reply, part)
        if bad is None:
            return halves(part)
        reason = self._client.reason(reply)
        answers[bad.at] = Reject(reason)
        rest = [action for action in part if action is not bad]
        if "too big" in _said_in(reply):
            for action in rest:
                if len(action.sent) > len(bad.sent):
                    answers[action.at] = Reject(
                        f"the record is larger than another that was refused: {reason}"
                    )
            rest = [action for action in rest if action.at not in answers]
        return [rest] if rest else []

    async def _published(self, index: str, task: int, end: float) -> None:
        """Wait until the task is done. The first check comes after half the time that the last task took."""
        begin, pause = time.monotonic(), self._pause
        while True:
            await asyncio.sleep(min(pause, max(end - time.monotonic(), 0.0)))
            status = await self._read("GET", _path(index, f"/task/{task}"))
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

    async def _do(
        self,
        method: str,
        index: str,
        path: str,
        asked: Mapping[str, Any] | None,
        seconds: float | None = None,
    ) -> None:
        reply = await self._ask(method, _path(index, path), asked)
        if not reply.ok:
            raise self._failed(reply)
        end = time.monotonic() + (self._timeout if seconds is None else seconds)
        await self._published(index, _task_of(reply), end)

    async def _user_data(self, index: str) -> Mapping[str, Any] | None:
        # Not from the hosts for reads, which may lag: a relay must see a new build, or it misses changes.
        reply = await self._ask("GET", _path(index, "/settings"))
        if reply.status == 404 or (reply.status == 403 and index.endswith(BUILDING)):
            # A key for the live index alone does not see a build index, and cannot build one either.
            return None
        if not reply.ok:
            raise self._failed(reply)
        data = _object_of(reply).get("userData")
        return data if isinstance(data, dict) else {}

    async def _read(
        self, method: str, path: str, asked: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        reply = await self._ask(method, path, asked, reading=True)
        if not reply.ok:
            raise self._failed(reply)
        return _object_of(reply)

    async def _ask(self, method: str, path: str, body: Any = None, *, reading: bool = False) -> Reply:
        """Ask the hosts in turn, until one is reachable and does not answer 5xx."""
        bases = self._application.reading if reading else self._application.writing
        now = time.monotonic()
        in_turn = sorted(bases, key=lambda base: self._down.get(base, 0.0) > now)
        for base in in_turn:
            last = base is in_turn[-1]
            try:
                reply = await self._client.request(method, path, body, bases=[base])
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

    def _failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        if reply.status == 429:
            return Throttled(self._client.reason(reply), after=reply.after)
        if _over_quota(reply):
            said = clean(_said_in(reply), [self._application.key])
            # Throttled, because deletes still work and an event that waits for space has not failed.
            return Throttled(f"{reply.where}: {reply.status}: {said}", after=reply.after)
        if reply.status in (400, 402) or reply.status >= 500:
            return Unavailable(self._client.reason(reply), after=reply.after)
        return self._client.failed(reply)


def _path(index: str, path: str) -> str:
    if index in ("", ".", "..", "*"):
        raise Reject(f"no index of Algolia can be called {index!r}")
    return f"/1/indexes/{quote(index, safe='')}{path}"


def _named(reply: Reply, part: Sequence[Item]) -> Item | None:
    """Return the record that Algolia names as bad: in its fields, or on newer clusters in the message."""
    error = _error_in(reply)
    found = _BAD.search(_said_in(reply))
    position = str(error.get("position", found and found[1]))
    name = error.get("objectID", found and found[2])
    named = part[int(position) :][:1] if re.fullmatch("[0-9]{1,9}", position, re.ASCII) else []
    if named and name in (None, named[0].id):
        return named[0]
    return next((action for action in part if action.id == name), None)


def _object_of(reply: Reply) -> Mapping[str, Any]:
    answer = reply.json()
    if not isinstance(answer, dict):
        raise Unavailable(f"{reply.where} answered in another way than Algolia does")
    return answer


def _task_of(reply: Reply) -> int:
    task = _object_of(reply).get("taskID")
    if not isinstance(task, int):
        raise Unavailable(f"{reply.where} answered {reply.status} without a task: is it Algolia?")
    return task


def _is_of_record(reply: Reply) -> bool:
    """True if Algolia's error is about records, not about the index."""
    said = _said_in(reply)
    return reply.status == 413 or (bool(said) and not _OF_INDEX.search(said))


def _said_in(reply: Reply) -> str:
    return str(_error_in(reply).get("message", ""))


def _over_quota(reply: Reply) -> bool:
    return reply.status in (402, 403) and "quota" in _said_in(reply).lower()


def _error_in(reply: Reply) -> Mapping[str, Any]:
    """Return the fields of Algolia's error, or ``{}`` if something else answered."""
    return reply.read(dict[str, Any]) or {}
