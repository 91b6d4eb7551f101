"""What an Algolia application holds, after its public documentation: indexes, and tasks that change them.

A task is accepted at once and published a little later, in order. Accepted tasks are written to a journal,
from which a process that restarts reads them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

Record: TypeAlias = dict[str, Any]
Work: TypeAlias = dict[str, Any]

DELAY = 0.01
"""Seconds from the acceptance of a task to its publication."""
SCOPES = ("settings", "synonyms", "rules")
DEFAULTS: Record = {"searchableAttributes": None, "hitsPerPage": 20, "userData": {}}
NOT_COPIED = ("replicas", "mode", "enableReRanking")


@dataclass
class Index:
    created: str
    updated: str
    records: dict[str, Record] = field(default_factory=dict)
    settings: Record = field(default_factory=lambda: deepcopy(DEFAULTS))
    synonyms: list[Record] = field(default_factory=list)
    rules: list[Record] = field(default_factory=list)


class Application:
    """The indexes and the queue of tasks."""

    def __init__(self, journal: Path) -> None:
        self.indexes: dict[str, Index] = {}
        self.delay = DELAY
        self.stuck = False
        self.lose = 0
        """How many of the next tasks are accepted and never published."""
        self._last = 1_506_303_845_000
        self._lost: set[int] = set()
        self._queue: deque[tuple[float, Work]] = deque()
        self._journal = journal.open("a+", encoding="utf-8")
        self._replay()

    def accept(self, work: Work) -> Work:
        """Accept a task; ``task`` and ``at`` are added to it."""
        self._last += 1
        work = {**work, "task": self._last, "at": _now()}
        if self.lose:
            self.lose -= 1
            self._lost.add(self._last)
            return work
        self._journal.write(f"{json.dumps(work)}\n")
        self._journal.flush()
        self._queue.append((time.monotonic() + self.delay, work))
        return work

    def settle(self) -> None:
        """Publish the tasks whose time has come."""
        while self._queue and not self.stuck and self._queue[0][0] <= time.monotonic():
            self._apply(self._queue.popleft()[1])

    def published(self, task: int) -> bool:
        """True if the task is done."""
        waiting = {work["task"] for _, work in self._queue}
        return task <= self._last and task not in waiting and task not in self._lost

    def pending(self, name: str) -> int:
        """Tasks of an index that are not published yet."""
        return sum(work["index"] == name for _, work in self._queue)

    def would_hold(self, name: str, requests: list[Record]) -> int:
        """Records of all indexes, those of the queue and of a batch to come among them."""
        known = {(name, id) for name, index in self.indexes.items() for id in index.records}
        queued = [(work["index"], work["requests"]) for _, work in self._queue if work["kind"] == "batch"]
        for index, batch in (*queued, (name, requests)):
            known |= {(index, each["body"]["objectID"]) for each in batch if each["action"] != "deleteObject"}
        return len(known)

    def _replay(self) -> None:
        self._journal.seek(0)
        for line in self._journal:
            work = json.loads(line)
            self._last = work["task"]
            self._apply(work)

    def _apply(self, work: Work) -> None:
        match work["kind"]:
            case "batch":
                index = self._opened(work)
                for request in work["requests"]:
                    apply_action(index.records, request["action"], request["body"])
            case "settings":
                self._opened(work).settings.update(work["settings"])
            case "delete":
                self.indexes.pop(work["index"], None)
            case "move":
                if moved := self.indexes.pop(work["index"], None):
                    self.indexes[work["destination"]] = moved
            case "copy":
                self._copy(work)

    def _copy(self, work: Work) -> None:
        source = self.indexes.get(work["index"]) or Index(work["at"], work["at"])
        target = self._opened({**work, "index": work["destination"]})
        if not work["scope"]:
            target.records = deepcopy(source.records)
        for scope in work["scope"] or SCOPES:
            setattr(target, scope, deepcopy(getattr(source, scope)))
        for name in NOT_COPIED:
            target.settings.pop(name, None)

    def _opened(self, work: Work) -> Index:
        index = self.indexes.setdefault(work["index"], Index(work["at"], work["at"]))
        index.updated = work["at"]
        return index


def apply_action(records: dict[str, Record], action: str, body: Record) -> None:
    """Apply one action of a batch to the records of an index."""
    name = body["objectID"]
    match action:
        case "addObject" | "updateObject":
            records[name] = body
        case "deleteObject":
            records.pop(name, None)
        case "partialUpdateObject" | "partialUpdateObjectNoCreate":
            if name in records or action == "partialUpdateObject":
                changed = _updated(records.get(name, {"objectID": name}), body)
                if changed is not None:
                    records[name] = changed


def _updated(record: Record, body: Record) -> Record | None:
    """Return the record with the attributes of ``body``, or None if an operation cancels the update."""
    changed = dict(record)
    for name, value in body.items():
        if not isinstance(value, dict) or "_operation" not in value:
            changed[name] = value
            continue
        old, operand = changed.get(name), value["value"]
        match value["_operation"]:
            case "Increment":
                changed[name] = (old or 0) + operand
            case "Decrement":
                changed[name] = (old or 0) - operand
            case "Add":
                changed[name] = [*(old or []), operand]
            case "AddUnique":
                changed[name] = [*(old or []), *([] if operand in (old or []) else [operand])]
            case "Remove":
                changed[name] = [each for each in old or [] if each != operand]
            case "IncrementFrom":
                if (old or 0) != operand:
                    return None
                changed[name] = operand + 1
            case "IncrementSet":
                if operand <= (old or 0):
                    return None
                changed[name] = operand
    return changed


def identified(action: str, body: Record) -> Record:
    """Return the body with an id; a record that is added without one gets one."""
    if action == "addObject" and "objectID" not in body:
        return {**body, "objectID": uuid4().hex}
    return {**body, "objectID": str(body["objectID"])}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
