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
from uuid import uuid4

from relaybox.core.outcome import Reject, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.algolia.hosts import (
    Application,
    Hosts,
    application_of,
    error_in,
    object_of,
    over_quota,
    path_of,
    said_in,
    task_of,
)
from relaybox.search.change import BUILDING
from relaybox.search.engine import TROUBLE, Change, Write, encode_changes, halves, pages, parts_of
from relaybox.search.http import Reply
from relaybox.sinks.sink import DELIVERED, Answer

MOST = 1000
LARGEST_BODY = 10_000_000
"""Bytes of a batch, as Algolia advises; one record may be larger."""
MOVE_SECONDS = 300.0
"""Seconds for a move, which is slower than a batch."""
MARK = "relaybox-index"
"""The key in ``userData`` of an index's settings; a later index of the same name has another value."""

_OF_INDEX = re.compile(r"index ?name", re.IGNORECASE)
_BAD = re.compile(r"[Rr]ecord at the position ([0-9]+)(?: objectID=(.*))? is too big", re.DOTALL)


def open_engine(destination: Destination) -> AlgoliaEngine:
    """Open the engine of an ``algolia://`` destination."""
    return AlgoliaEngine(application_of(destination), destination.timeout)


class AlgoliaEngine:
    """The indexes of an Algolia application."""

    most = MOST

    def __init__(self, application: Application, timeout: float) -> None:
        self._hosts = Hosts(application, timeout)
        self._application = application
        self.where = application.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Return an answer for each change, once all tasks are published."""
        answers: dict[int, Answer] = {}
        actions = encode_changes(changes, self._application.action_of, answers)
        tasks = await self._send(index, actions, answers)
        end = time.monotonic() + self._hosts.timeout
        trouble: Answer | None = None
        for task, part in tasks:
            if trouble is None:
                try:
                    await self._hosts.published(index, task, end)
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
            await self._hosts.do("POST", like, "/operation", asked)
            kept = await self._user_data(name) or {}
        await self._hosts.do("PUT", name, "/settings", {"userData": {**kept, MARK: uuid4().hex}})

    async def replace(self, live: str, fresh: str) -> None:
        """Move ``fresh`` over ``live``. Algolia reports no missing index, so check before and after."""
        mark = (await self.present([fresh])).get(fresh)
        if mark is None:
            raise Unavailable(f"the index {fresh!r} does not exist on {self.where}; {live!r} stays as it is")
        asked = {"operation": "move", "destination": live}
        await self._hosts.do("POST", fresh, "/operation", asked, max(self._hosts.timeout, MOVE_SECONDS))
        if (await self.present([live])).get(live) != mark:
            raise Unavailable(f"{self.where} did not move {fresh!r} to {live!r}; was it deleted meanwhile?")

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        await self._hosts.do("DELETE", name, "")

    async def refresh(self, index: str) -> None:
        """Do nothing: writes are visible when their task is published."""

    async def count(self, index: str) -> int:
        """Return the number of records, from the list of all indexes."""
        listed = await self._hosts.json("GET", "/1/indexes")
        for item in listed["items"]:
            if item["name"] == index:
                return int(item["entries"])
        raise self._hosts.missing(index)

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the records with these ids that exist, without the attributes that Relaybox added."""
        found: dict[str, Mapping[str, Any]] = {}
        for some in pages(ids, MOST):
            requests = [{"indexName": index, "objectID": id} for id in some]
            answer = await self._hosts.json("POST", "/1/indexes/*/objects", {"requests": requests})
            found |= {
                each["objectID"]: self._application.document_of(each) for each in answer["results"] if each
            }
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all records, a thousand at a time."""
        asked: dict[str, Any] = {"attributesToRetrieve": ["objectID"], "hitsPerPage": MOST}
        while True:
            page = await self._hosts.json("POST", path_of(index, "/browse"), asked)
            if page["hits"]:
                yield [hit["objectID"] for hit in page["hits"]]
            if not page.get("cursor"):
                return
            asked["cursor"] = page["cursor"]

    async def check(self) -> None:
        """List the indexes, which needs a valid key. Raise ``Unavailable`` with the reason."""
        await self._hosts.json("GET", "/1/indexes?page=0&hitsPerPage=1")

    async def close(self) -> None:
        """Close the connections."""
        await self._hosts.close()

    async def _send(
        self, index: str, actions: Sequence[Write], answers: dict[int, Answer]
    ) -> Sequence[tuple[int, Sequence[Write]]]:
        """Send the actions; return the tasks of what Algolia took, and answer the rest."""
        tasks = []
        left = list(parts_of(actions, LARGEST_BODY))
        end = time.monotonic() + self._hosts.timeout
        while left:
            part = left.pop()
            body = b'{"requests":[%b]}' % b",".join([action.sent for action in part])
            try:
                if time.monotonic() > end:
                    raise Unavailable(f"{self.where} has not taken all within {self._hosts.timeout:g}s")
                reply = await self._hosts.ask("POST", path_of(index, "/batch"), body)
                if reply.ok:
                    tasks.append((task_of(reply), part))
                elif reply.status == 413 and len(part) > 1:
                    left += halves(part)
                elif reply.status in (400, 413) and _is_of_record(reply):
                    left += self._without_bad(reply, part, answers)
                elif over_quota(reply) and len(part) > 1:
                    # Deletes free space and must not wait for it; some of the others may still fit.
                    deletes = [action for action in part if action.deletes]
                    fewer = deletes if 0 < len(deletes) < len(part) else part[: len(part) // 2]
                    left.append(fewer)
                    refused = self._hosts.failed(reply)
                    answers.update((action.at, refused) for action in part if action not in fewer)
                else:
                    raise self._hosts.failed(reply)
            except TROUBLE as error:
                # The application or the index is in trouble, so the rest would fail too.
                for action in (*part, *(each for more in left for each in more)):
                    answers[action.at] = error
                break
        return tasks

    def _without_bad(
        self, reply: Reply, part: Sequence[Write], answers: dict[int, Answer]
    ) -> list[Sequence[Write]]:
        """Set the answer of the bad record in a refused batch; return the batches to try next."""
        bad = part[0] if len(part) == 1 else _named(reply, part)
        if bad is None:
            return halves(part)
        reason = self._hosts.reason(reply)
        answers[bad.at] = Reject(reason)
        rest = [action for action in part if action is not bad]
        if "too big" in said_in(reply):
            for action in rest:
                if len(action.sent) > len(bad.sent):
                    answers[action.at] = Reject(
                        f"the record is larger than another that was refused: {reason}"
                    )
            rest = [action for action in rest if action.at not in answers]
        return [rest] if rest else []

    async def _user_data(self, index: str) -> Mapping[str, Any] | None:
        # Not from the hosts for reads, which may lag: a relay must see a new build, or it misses changes.
        reply = await self._hosts.ask("GET", path_of(index, "/settings"))
        if reply.status == 404 or (reply.status == 403 and index.endswith(BUILDING)):
            # A key for the live index alone does not see a build index, and cannot build one either.
            return None
        if not reply.ok:
            raise self._hosts.failed(reply)
        data = object_of(reply).get("userData")
        return data if isinstance(data, dict) else {}


def _named(reply: Reply, part: Sequence[Write]) -> Write | None:
    """Return the record that Algolia names as bad: in its fields, or on newer clusters in the message."""
    error = error_in(reply)
    found = _BAD.search(said_in(reply))
    position = str(error.get("position", found and found[1]))
    name = error.get("objectID", found and found[2])
    named = part[int(position) :][:1] if re.fullmatch("[0-9]{1,9}", position, re.ASCII) else []
    if named and name in (None, named[0].id):
        return named[0]
    return next((action for action in part if action.id == name), None)


def _is_of_record(reply: Reply) -> bool:
    """True if Algolia's error is about records, not about the index."""
    said = said_in(reply)
    return reply.status == 413 or (bool(said) and not _OF_INDEX.search(said))
