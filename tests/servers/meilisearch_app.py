"""An imitation of Meilisearch, by its public documentation: ``python -m tests.servers.meilisearch_app``.

A real one cannot be had everywhere. What is outside of its API begins with ``/__``: faults to inject, and how
often it was asked what.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web
from msgspec import DecodeError, json

from tests.servers.meilisearch_answer import (
    answer,
    checked_uid,
    fields_of,
    listed,
    number,
    page,
    shown,
    uid_of,
)
from tests.servers.meilisearch_document import SETTINGS, Failed, split_documents
from tests.servers.meilisearch_state import ADDITION, DELETION, FINISHED, Index, State, Task, stamp

READY = "Meilisearch imitation is ready"
VERSION = "1.15.2"
ACCEPTED = "`application/json`, `application/x-ndjson`, `text/csv`"

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    def __init__(self, key: str, directory: Path, limit: int) -> None:
        self.state = State(directory)
        self.asked: Counter[str] = Counter()
        self.faults: dict[str, Any] = {}
        self._key = key
        self._limit = limit
        self._work = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        one, documents = "/indexes/{uid}", "/indexes/{uid}/documents"
        return [
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/stats", self.stats),
            web.get("/indexes", self.list_indexes),
            web.post("/indexes", self.create_index),
            web.get(one, self.get_index),
            web.patch(one, self.update_index),
            web.delete(one, self.delete_index),
            web.get(f"{one}/stats", self.index_stats),
            web.get(f"{one}/settings", self.get_settings),
            web.patch(f"{one}/settings", self.update_settings),
            web.post(f"{one}/search", self.search),
            web.get(documents, self.list_documents),
            web.post(documents, self.add_documents),
            web.put(documents, self.add_documents),
            web.delete(documents, self.delete_all),
            web.post(f"{documents}/fetch", self.fetch_documents),
            web.post(f"{documents}/delete-batch", self.delete_batch),
            web.get(f"{documents}/{{id}}", self.get_document),
            web.delete(f"{documents}/{{id}}", self.delete_document),
            web.post("/swap-indexes", self.swap_indexes),
            web.get("/tasks", self.list_tasks),
            web.get("/tasks/{task}", self.get_task),
            web.post("/tasks/cancel", self.cancel_tasks),
            web.post("/__faults", self.set_faults),
            web.get("/__asked", self.get_asked),
        ]

    async def schedule(self) -> None:
        """Run what was enqueued, one batch at a time, without end."""
        while True:
            batch = self.state.next_batch()
            if not batch or (self.faults.get("paused") and batch[0].type != "taskCancelation"):
                self._work.clear()
                await self._work.wait()
                continue
            self.state.begin(batch)
            # Who asks meanwhile sees them in process.
            await asyncio.sleep(self.faults.get("delay", 0.0))
            self.state.finish(batch, self._failing)

    def _failing(self, task: Task) -> Failed | None:
        for fault in self.faults.get("tasks", ()):
            if fault["count"] > 0 and fault.get("type") in (None, task.type):
                fault["count"] -= 1
                return Failed(fault["code"], fault.get("message", f"a test made it fail: {fault['code']}"))
        return None

    def _enqueued(self, task: Task, status: int = 202) -> web.Response:
        self._work.set()
        return answer(task.summary(), status)

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, inject the faults, and format failures."""
        if request.path.startswith("/__"):
            return await handler(request)
        resource = request.match_info.route.resource
        self.asked[f"{request.method} {resource.canonical if resource else request.path}"] += 1
        try:
            fault = self._fault(request)
            if "status" in fault:
                after = {"Retry-After": str(fault["after"])} if "after" in fault else {}
                return web.Response(status=fault["status"], headers=after, text=fault.get("text", ""))
            if fault.get("drop") == "before":
                return _dropped(request)
            self._check_key(request)
            done = await handler(request)
            return _dropped(request) if fault.get("drop") == "after" else done
        except Failed as failed:
            return answer(failed.as_json(), failed.status)
        except web.HTTPException as error:
            return answer(Failed("not_found", error.reason).as_json(), error.status)

    def _fault(self, request: web.Request) -> dict[str, Any]:
        for fault in self.faults.get("requests", ()):
            if fault["count"] > 0 and re.search(fault.get("on", ""), f"{request.method} {request.path}"):
                fault["count"] -= 1
                return dict(fault)
        return {}

    def _check_key(self, request: web.Request) -> None:
        if not self._key or request.path == "/health":
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer":
            said = "The Authorization header is missing. It must use the bearer authorization method."
            raise Failed("missing_authorization_header", said, 401)
        if given != self._key:
            raise Failed("invalid_api_key", "The provided API key is invalid.", 403)

    async def _body(self, request: web.Request) -> bytes:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > self._limit:
                # Read the rest of it, so that the connection is not reset and the answer lost.
                async for _ in request.content.iter_any():
                    pass
                said = f"The provided payload reached the size limit. The maximum is {self._limit} B."
                raise Failed("payload_too_large", said, 413)
        return bytes(body)

    async def _json(self, request: web.Request) -> Any:
        if request.headers.get("Content-Type") is None:
            raise _no_content_type()
        body = await self._body(request)
        if not body:
            raise Failed("missing_payload", "A json payload is missing.")
        try:
            return json.decode(body)
        except DecodeError as error:
            said = f"The json payload provided is malformed. `{error}`."
            raise Failed("malformed_payload", said) from None

    async def health(self, _: web.Request) -> web.Response:
        return answer({"status": "available"})

    async def version(self, _: web.Request) -> web.Response:
        return answer({"commitSha": "unknown", "commitDate": "unknown", "pkgVersion": VERSION})

    async def stats(self, _: web.Request) -> web.Response:
        indexes = self.state.indexes
        size = sum(len(raw) for each in indexes.values() for raw in each.documents.values())
        updated = max((each.updated for each in indexes.values()), default=None)
        return answer(
            {
                "databaseSize": size,
                "usedDatabaseSize": size,
                "lastUpdate": stamp(updated),
                "indexes": {uid: self._stats_of(uid, each) for uid, each in indexes.items()},
            }
        )

    async def index_stats(self, request: web.Request) -> web.Response:
        return answer(self._stats_of(uid_of(request), self._index(request)))

    def _stats_of(self, uid: str, index: Index) -> dict[str, Any]:
        size = sum(map(len, index.documents.values()))
        busy = any(task.index == uid and task.status == "processing" for task in self.state.waiting.values())
        return {
            "numberOfDocuments": len(index.documents),
            "rawDocumentDbSize": size,
            "avgDocumentSize": size // max(len(index.documents), 1),
            "isIndexing": busy,
            "numberOfEmbeddings": 0,
            "numberOfEmbeddedDocuments": 0,
            "fieldDistribution": {name: count for name, count in index.fields.items() if count},
        }

    def _index(self, request: web.Request) -> Index:
        return self.state.found(uid_of(request))

    async def list_indexes(self, request: web.Request) -> web.Response:
        listed = [index.as_json(uid) for uid, index in sorted(self.state.indexes.items())]
        return answer(page(listed, request.query, "index"))

    async def get_index(self, request: web.Request) -> web.Response:
        return answer(self._index(request).as_json(uid_of(request)))

    async def create_index(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        if "uid" not in body:
            raise Failed("missing_index_uid", "Missing field `uid`")
        uid, key = checked_uid(body["uid"]), body.get("primaryKey")
        return self._enqueued(
            self.state.enqueue("indexCreation", uid, {"primaryKey": key}, {"primaryKey": key})
        )

    async def update_index(self, request: web.Request) -> web.Response:
        key = (await self._json(request)).get("primaryKey")
        task = self.state.enqueue("indexUpdate", uid_of(request), {"primaryKey": key}, {"primaryKey": key})
        return self._enqueued(task)

    async def delete_index(self, request: web.Request) -> web.Response:
        return self._enqueued(
            self.state.enqueue("indexDeletion", uid_of(request), {"deletedDocuments": None})
        )

    async def get_settings(self, request: web.Request) -> web.Response:
        return answer(self._index(request).settings)

    async def update_settings(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        if unknown := body.keys() - SETTINGS.keys():
            raise Failed("bad_request", f"Unknown field `{min(unknown)}`")
        return self._enqueued(self.state.enqueue("settingsUpdate", uid_of(request), dict(body), body))

    async def swap_indexes(self, request: web.Request) -> web.Response:
        swaps = await self._json(request)
        named = [uid for swap in swaps for uid in swap["indexes"]]
        if any(len(swap["indexes"]) != 2 for swap in swaps):
            raise Failed("invalid_swap_indexes", "Two indexes must be given for each swap.")
        if twice := [uid for uid, count in Counter(named).items() if count > 1]:
            said = (
                f"Indexes must be declared only once during a swap. `{twice[0]}` was specified several times."
            )
            raise Failed("invalid_swap_duplicate_index_found", said)
        return self._enqueued(self.state.enqueue("indexSwap", None, {"swaps": swaps}, {"swaps": swaps}))

    async def add_documents(self, request: web.Request) -> web.Response:
        uid, kind = uid_of(request), request.headers.get("Content-Type", "").partition(";")[0]
        if not kind:
            raise _no_content_type()
        if kind not in ("application/json", "application/x-ndjson"):
            said = f"The Content-Type `{kind}` is invalid. Accepted values for it are: {ACCEPTED}"
            raise Failed("invalid_content_type", said, 415)
        documents = split_documents(await self._body(request), lines=kind == "application/x-ndjson")
        details = {"receivedDocuments": len(documents), "indexedDocuments": None}
        params = {"primaryKey": request.query.get("primaryKey"), "partial": request.method == "PUT"}
        return self._enqueued(self.state.enqueue(ADDITION, uid, details, params, documents))

    def _deletion(self, request: web.Request, provided: int, params: dict[str, Any]) -> web.Response:
        details = {"providedIds": provided, "originalFilter": None, "deletedDocuments": None}
        return self._enqueued(self.state.enqueue(DELETION, uid_of(request), details, params))

    async def delete_batch(self, request: web.Request) -> web.Response:
        ids = [str(each) for each in await self._json(request)]
        return self._deletion(request, len(ids), {"ids": ids})

    async def delete_document(self, request: web.Request) -> web.Response:
        return self._deletion(request, 1, {"ids": [request.match_info["id"]]})

    async def delete_all(self, request: web.Request) -> web.Response:
        return self._deletion(request, 0, {"all": True})

    async def get_document(self, request: web.Request) -> web.Response:
        raw = self._index(request).documents.get(request.match_info["id"])
        if raw is None:
            raise Failed("document_not_found", f"Document `{request.match_info['id']}` not found.", 404)
        return answer(shown(json.decode(raw), fields_of(request.query.get("fields"))))

    async def list_documents(self, request: web.Request) -> web.Response:
        ids = request.query["ids"].split(",") if "ids" in request.query else None
        return answer(listed(self._index(request), request.query, request.query.get("fields"), ids))

    async def fetch_documents(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        if unknown := body.keys() - {"offset", "limit", "fields", "ids", "retrieveVectors"}:
            raise Failed("bad_request", f"Unknown field `{min(unknown)}`")
        ids = None if body.get("ids") is None else [str(each) for each in body["ids"]]
        return answer(listed(self._index(request), body, body.get("fields"), ids))

    async def search(self, request: web.Request) -> web.Response:
        body = await self._json(request)
        words = re.findall(r"\w+", (body.get("q") or "").lower())
        index, limit, offset = self._index(request), body.get("limit", 20), body.get("offset", 0)
        hits = []
        for document in map(json.decode, index.documents.values()):
            text = re.findall(r"\w+", " ".join(map(str, document.values())).lower())
            if all(any(each.startswith(word) for each in text) for word in words):
                hits.append(document)
        return answer(
            {
                "hits": hits[offset : offset + limit],
                "query": body.get("q") or "",
                "processingTimeMs": 1,
                "limit": limit,
                "offset": offset,
                "estimatedTotalHits": len(hits),
            }
        )

    async def list_tasks(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        limit = number(query.pop("limit", "20"), "limit", "task")
        start = query.pop("from", None)
        if not re.fullmatch(r"[0-9]+(,[0-9]+)*|\*", query.get("uids", "*")):
            said = "Invalid value in parameter `uids`: could not parse as a positive integer"
            raise Failed("invalid_task_uids", said)
        found = list(self.state.matching(query))
        rest = [task for task in found if start is None or task.uid <= int(start)]
        return answer(
            {
                "results": [task.as_json() for task in rest[:limit]],
                "total": len(found),
                "limit": limit,
                "from": rest[0].uid if rest else None,
                "next": rest[limit].uid if len(rest) > limit else None,
            }
        )

    async def get_task(self, request: web.Request) -> web.Response:
        name = request.match_info["task"]
        task = self.state.tasks.get(int(name)) if name.isdecimal() else None
        if task is None:
            raise Failed("task_not_found", f"Task `{name}` not found.", 404)
        return answer(task.as_json())

    async def cancel_tasks(self, request: web.Request) -> web.Response:
        if not request.query:
            said = "Query parameters to filter the tasks to cancel are missing."
            raise Failed("missing_task_filters", said)
        uids = [task.uid for task in self.state.matching(request.query) if task.status not in FINISHED]
        asked = f"?{request.query_string}"
        details = {"matchedTasks": len(uids), "canceledTasks": None, "originalFilter": asked}
        return self._enqueued(self.state.enqueue("taskCancelation", None, details, {"uids": uids}), 200)

    async def set_faults(self, request: web.Request) -> web.Response:
        self.faults = await request.json()
        self.state.quota = self.faults.get("quota")
        self._work.set()
        return answer({})

    async def get_asked(self, _: web.Request) -> web.Response:
        return answer(dict(self.asked))


def _no_content_type() -> Failed:
    said = f"A Content-Type header is missing. Accepted values for it are: {ACCEPTED}"
    return Failed("missing_content_type", said, 415)


def _dropped(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def serve(port: int, key: str, limit: int) -> None:
    directory = Path.cwd()
    app = App(key, directory, limit)
    server = web.Application(middlewares=[app.around], client_max_size=0)
    server.add_routes(app.routes())
    runner = web.AppRunner(server, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    (directory / "server.pid").write_text(str(os.getpid()))
    os.write(1, f"{READY}\n".encode())
    await app.schedule()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, os.environ.get("MEILI_MASTER_KEY", ""), arguments.limit))
