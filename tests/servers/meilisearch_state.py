"""What the imitation of Meilisearch knows: indexes, tasks, the order in which they run, and a journal.

Every task is written down before it is answered, and every batch when it is finished: a server that was
killed and starts again has done what it said it had done, and does the rest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import json, msgpack

from tests.servers.meilisearch_document import SETTINGS, Failed, identifier, primary_key

FINISHED = ("succeeded", "failed", "canceled")
ADDITION, DELETION = "documentAdditionOrUpdate", "documentDeletion"


@dataclass
class Task:
    uid: int
    index: str | None
    type: str
    enqueued: datetime
    details: dict[str, Any]
    params: dict[str, Any]
    """What it was asked, for the tests."""
    documents: list[bytes] = field(default_factory=list)
    status: str = "enqueued"
    error: dict[str, str] | None = None
    canceled_by: int | None = None
    batch: int | None = None
    started: datetime | None = None
    finished: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        lasted = self.finished - self.started if self.finished and self.started else None
        return {
            "uid": self.uid,
            "batchUid": self.batch,
            "indexUid": self.index,
            "status": self.status,
            "type": self.type,
            "canceledBy": self.canceled_by,
            "details": self.details,
            "error": self.error,
            "duration": None if lasted is None else f"PT{lasted.total_seconds():.6f}S",
            "enqueuedAt": stamp(self.enqueued),
            "startedAt": stamp(self.started),
            "finishedAt": stamp(self.finished),
        }

    def summary(self) -> dict[str, Any]:
        return {
            "taskUid": self.uid,
            "indexUid": self.index,
            "status": "enqueued",
            "type": self.type,
            "enqueuedAt": stamp(self.enqueued),
        }


@dataclass
class Index:
    created: datetime
    updated: datetime
    primary_key: str | None = None
    documents: dict[str, bytes] = field(default_factory=dict)
    fields: Counter[str] = field(default_factory=Counter)
    settings: dict[str, Any] = field(default_factory=lambda: dict(SETTINGS))

    def as_json(self, uid: str) -> dict[str, Any]:
        return {
            "uid": uid,
            "createdAt": stamp(self.created),
            "updatedAt": stamp(self.updated),
            "primaryKey": self.primary_key,
        }

    def put(self, key: str, raw: bytes, document: Mapping[str, Any]) -> None:
        self.drop(key)
        self.documents[key] = raw
        self.fields.update(document.keys())

    def drop(self, key: str) -> bool:
        old = self.documents.pop(key, None)
        if old is not None:
            self.fields.subtract(json.decode(old).keys())
        return old is not None


class State:
    """Runs tasks one batch at a time; the caller says when, and which of them fail."""

    def __init__(self, directory: Path) -> None:
        self.indexes: dict[str, Index] = {}
        self.tasks: dict[int, Task] = {}
        self.waiting: dict[int, Task] = {}
        self.quota: int | None = None
        self._batches = 0
        self._last = datetime.now(UTC)
        file = directory / "journal"
        if file.exists():
            self._replay(file.read_bytes())
        self._journal = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def now(self) -> datetime:
        """Return the time, never the same twice."""
        self._last = max(datetime.now(UTC), self._last + timedelta(microseconds=1))
        return self._last

    def enqueue(
        self,
        kind: str,
        index: str | None,
        details: dict[str, Any],
        params: dict[str, Any] | None = None,
        documents: Iterable[bytes] = (),
    ) -> Task:
        task = Task(len(self.tasks), index, kind, self.now(), details, params or {}, list(documents))
        self._write("task", [task.uid, index, kind, task.enqueued, details, task.params, task.documents])
        self._add(task)
        return task

    def next_batch(self) -> list[Task]:
        """Return what runs next: a cancelation, else the oldest with all additions to its index."""
        for task in reversed(self.waiting.values()):
            if task.type == "taskCancelation":
                return [task]
        batch: list[Task] = []
        for task in self.waiting.values():
            if batch and not _go_together(batch[0], task):
                break
            batch.append(task)
            if task.type != ADDITION:
                break
        return batch

    def begin(self, batch: Iterable[Task]) -> None:
        started = self.now()
        for task in batch:
            task.status, task.started, task.batch = "processing", started, self._batches

    def finish(self, batch: Iterable[Task], failing: Callable[[Task], Failed | None]) -> None:
        forced = {task.uid: failed for task in batch if (failed := failing(task)) is not None}
        at = self.now()
        entries = [[task.uid, task.started, at] for task in batch]
        self._write("done", [entries, {uid: [f.code, f.message] for uid, f in forced.items()}, self.quota])
        self._run(batch, at, forced)

    def matching(self, query: Mapping[str, str]) -> Iterator[Task]:
        """Return the tasks that a query of the API names, the newest first."""
        wanted = {name: frozenset(text.split(",")) for name, text in query.items() if text != "*"}
        among: Iterable[Task] = reversed(self.tasks.values())
        if "uids" in wanted:
            uids = sorted((int(uid) for uid in wanted.pop("uids") if int(uid) in self.tasks), reverse=True)
            among = [self.tasks[uid] for uid in uids]
        for task in among:
            has = {"statuses": task.status, "types": task.type, "indexUids": task.index}
            if all(has[name] in values for name, values in wanted.items() if name in has):
                yield task

    def _add(self, task: Task) -> None:
        self.tasks[task.uid] = self.waiting[task.uid] = task

    def _write(self, kind: str, values: list[Any]) -> None:
        record = msgpack.encode([kind, *values])
        os.write(self._journal, len(record).to_bytes(4, "big") + record)

    def _replay(self, written: bytes) -> None:
        at = 0
        while at + 4 <= len(written):
            size = int.from_bytes(written[at : at + 4], "big")
            if at + 4 + size > len(written):
                break
            kind, *values = msgpack.decode(written[at + 4 : at + 4 + size])
            at += 4 + size
            if kind == "task":
                uid, index, type_, enqueued, details, params, documents = values
                self._add(Task(uid, index, type_, enqueued, details, params, documents))
                continue
            entries, forced, self.quota = values
            batch = [self.tasks[uid] for uid, _, _ in entries]
            for task, (_, started, _) in zip(batch, entries, strict=True):
                task.started, task.batch = started, self._batches
            self._run(batch, entries[0][2], {int(uid): Failed(*said) for uid, said in forced.items()})
        self.quota = None

    def _run(self, batch: Iterable[Task], at: datetime, forced: Mapping[int, Failed]) -> None:
        self._batches += 1
        for task in batch:
            self.waiting.pop(task.uid, None)
            try:
                if task.uid in forced:
                    raise forced[task.uid]
                RUN[task.type](self, task, at)
                task.status = "succeeded"
            except Failed as failed:
                task.status, task.error = "failed", failed.as_json()
                task.details.update({name: 0 for name in _COUNTS if name in task.details})
            task.finished = at
            task.documents = []

    def found(self, uid: str | None) -> Index:
        index = self.indexes.get(uid or "")
        if index is None:
            raise Failed("index_not_found", f"Index `{uid}` not found.", 404)
        return index

    def add_documents(self, task: Task, at: datetime) -> None:
        assert task.index is not None
        there = self.indexes.get(task.index)
        # Not before startedAt, as with the real one, which makes the index in the midst of the task.
        index = there or Index(task.started or at, at)
        decoded = [json.decode(raw) for raw in task.documents]
        key = primary_key(index.primary_key, task.params.get("primaryKey"), decoded)
        new: dict[str, tuple[bytes, dict[str, Any]]] = {}
        for raw, document in zip(task.documents, decoded, strict=True):
            name = identifier(document, key, index.settings, task.index)
            if task.params["partial"]:
                before = new[name][1] if name in new else json.decode(index.documents.get(name, b"{}"))
                document = {**before, **document}
                raw = json.encode(document)
            new[name] = raw, document
        total = sum(len(each.documents) for each in self.indexes.values())
        if self.quota is not None and total + len(new.keys() - index.documents.keys()) > self.quota:
            raise Failed("database_size_limit_reached", "Maximum database size has been reached.")
        for name, (raw, document) in new.items():
            index.put(name, raw, document)
        index.primary_key, index.updated = key, at
        self.indexes[task.index] = index
        task.details["indexedDocuments"] = len(task.documents)

    def delete_documents(self, task: Task, at: datetime) -> None:
        index = self.found(task.index)
        gone = list(index.documents) if task.params.get("all") else task.params["ids"]
        task.details["deletedDocuments"] = sum(index.drop(name) for name in gone)
        index.updated = at

    def create_index(self, task: Task, at: datetime) -> None:
        assert task.index is not None
        if task.index in self.indexes:
            raise Failed("index_already_exists", f"Index `{task.index}` already exists.")
        self.indexes[task.index] = Index(at, at, task.params["primaryKey"])

    def update_index(self, task: Task, at: datetime) -> None:
        index = self.found(task.index)
        if index.documents:
            said = f"Index `{task.index}`: Index already has a primary key: `{index.primary_key}`."
            raise Failed("index_primary_key_already_exists", said)
        index.primary_key, index.updated = task.params["primaryKey"], at

    def delete_index(self, task: Task, at: datetime) -> None:
        task.details["deletedDocuments"] = len(self.found(task.index).documents)
        del self.indexes[task.index or ""]

    def update_settings(self, task: Task, at: datetime) -> None:
        assert task.index is not None
        index = self.indexes.setdefault(task.index, Index(task.started or at, at))
        for name, value in task.params.items():
            index.settings[name] = SETTINGS[name] if value is None else value
        index.updated = at

    def swap_indexes(self, task: Task, at: datetime) -> None:
        swaps = [swap["indexes"] for swap in task.params["swaps"]]
        if missing := sorted({uid for pair in swaps for uid in pair} - self.indexes.keys()):
            names = ", ".join(f"`{uid}`" for uid in missing)
            said = f"Index {names} not found." if len(missing) == 1 else f"Indexes {names} not found."
            raise Failed("index_not_found", said)
        for one, other in swaps:
            self.indexes[one], self.indexes[other] = self.indexes[other], self.indexes[one]
            for each in self.tasks.values():
                if each.uid < task.uid and each.status in FINISHED and each.index in (one, other):
                    each.index = other if each.index == one else one

    def cancel_tasks(self, task: Task, at: datetime) -> None:
        for uid in task.params["uids"]:
            other = self.tasks[uid]
            if other.status in FINISHED:
                continue
            self.waiting.pop(uid, None)
            other.status, other.canceled_by, other.finished = "canceled", task.uid, at
            task.details["canceledTasks"] = (task.details["canceledTasks"] or 0) + 1
        task.details["canceledTasks"] = task.details["canceledTasks"] or 0


RUN: dict[str, Callable[[State, Task, datetime], None]] = {
    ADDITION: State.add_documents,
    DELETION: State.delete_documents,
    "indexCreation": State.create_index,
    "indexUpdate": State.update_index,
    "indexDeletion": State.delete_index,
    "settingsUpdate": State.update_settings,
    "indexSwap": State.swap_indexes,
    "taskCancelation": State.cancel_tasks,
}
_COUNTS = ("indexedDocuments", "deletedDocuments", "canceledTasks")


def stamp(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _go_together(first: Task, task: Task) -> bool:
    return (first.type, first.index, first.params) == (task.type, task.index, task.params)
