"""A local Algolia: the part of its documented REST API that keeps an index, in a process of its own.

``POST /__faults`` sets what goes wrong (see ``Faults``), ``GET /__requests`` tells what was asked for.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from tests.servers import restart
from tests.servers.algolia import READY
from tests.servers.algolia_index import DELAY, Application, Index, Record, identified

ACTIONS = (
    "addObject",
    "updateObject",
    "partialUpdateObject",
    "partialUpdateObjectNoCreate",
    "deleteObject",
)
TOO_BIG = "https://www.algolia.com/doc/guides/sending-and-managing-data/prepare-your-data/"
QUOTA = "You have exceeded your Record quota. You'll need to change your plan, or delete records."


@dataclass
class Faults:
    """What goes wrong. ``times`` requests (whose path ends with ``path``) are answered ``status``."""

    status: int = 500
    times: int = 0
    skip: int = 0
    path: str = ""
    message: str = "Internal Error"
    retry_after: str | None = None
    drop: int = 0
    """How many of the next requests (to ``path``) are done, and get no answer: the connection ends."""
    quota: int | None = None
    record_limit: int = 10_000
    body_limit: int = 50_000_000
    terse: bool = False
    """Whether the fields that name a bad record are left out, as on Algolia's newer clusters."""

    def strikes(self, path: str) -> bool:
        if not self.times or not path.endswith(self.path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Refused(Exception):
    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.answer = {"message": message, **more, "status": status}


class Api:
    def __init__(self, application: str, key: str, journal: Path) -> None:
        self._pair = (application, key)
        self._held = Application(journal)
        self._faults = Faults()
        self._requests: list[list[Any]] = []

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=1 << 30)
        one = "/1/indexes/{index}"
        app.add_routes(
            [
                web.post("/__faults", self._set_faults),
                web.get("/__requests", self._asked),
                web.get("/1/indexes", self._list),
                web.post("/1/indexes/*/objects", self._objects),
                web.post(f"{one}/batch", self._batch),
                web.get(f"{one}/task/{{task:[0-9]+}}", self._task),
                web.post(f"{one}/browse", self._browse),
                web.post(f"{one}/query", self._query),
                web.post(f"{one}/operation", self._operation),
                web.get(f"{one}/settings", self._settings),
                web.put(f"{one}/settings", self._set_settings),
                web.delete(one, self._delete),
            ]
        )
        return app

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/__"):
            return await handler(request)
        body = await request.read()
        self._requests.append([request.method, request.path, len(body)])
        try:
            self._check(request, len(body))
            self._held.settle()
            answer = await handler(request)
        except Refused as error:
            headers = {}
            if self._faults.retry_after is not None:
                headers["Retry-After"] = self._faults.retry_after
            return web.json_response(error.answer, status=error.answer["status"], headers=headers)
        if self._faults.drop and request.path.endswith(self._faults.path) and request.transport:
            self._faults.drop -= 1
            request.transport.abort()
        return answer

    def _check(self, request: web.Request, size: int) -> None:
        faults, given = self._faults, request.headers
        if faults.strikes(request.path):
            raise Refused(faults.status, faults.message)
        if (given.get("X-Algolia-Application-Id"), given.get("X-Algolia-API-Key")) != self._pair:
            raise Refused(403, "Invalid Application-ID or API key")
        if size > faults.body_limit:
            raise Refused(413, "Request Entity Too Large")

    async def _set_faults(self, request: web.Request) -> web.Response:
        given = await request.json()
        if not given:
            self._faults, given = Faults(), {"stuck": False, "lose": 0, "delay": DELAY}
        for name, value in given.items():
            setattr(self._held if name in ("stuck", "lose", "delay") else self._faults, name, value)
        return web.json_response({})

    async def _asked(self, _: web.Request) -> web.Response:
        return web.json_response(self._requests)

    async def _list(self, request: web.Request) -> web.Response:
        items = [self._described(name, index) for name, index in sorted(self._held.indexes.items())]
        if "page" not in request.query:
            return web.json_response({"items": items, "nbPages": 1})
        page, size = int(request.query["page"]), int(request.query.get("hitsPerPage", 100))
        shown = items[page * size : (page + 1) * size]
        return web.json_response({"items": shown, "nbPages": -(-len(items) // size)})

    def _described(self, name: str, index: Index) -> Record:
        size, pending = len(json.dumps(list(index.records.values()))), self._held.pending(name)
        return {
            "name": name,
            "createdAt": index.created if index.records else "",
            "updatedAt": index.updated,
            "entries": len(index.records),
            "dataSize": size,
            "fileSize": 2 * size,
            "lastBuildTimeS": 0,
            "numberOfPendingTasks": pending,
            "pendingTask": pending > 0,
        }

    async def _objects(self, request: web.Request) -> web.Response:
        results: list[Record | None] = []
        for each in (await request.json())["requests"]:
            record = self._index(each["indexName"]).records.get(str(each["objectID"]))
            results.append(record and _chosen(record, each.get("attributesToRetrieve")))
        return web.json_response({"results": results})

    async def _batch(self, request: web.Request) -> web.Response:
        try:
            requests = [_checked(each) for each in (await request.json())["requests"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(400, f"Invalid JSON: {error} near line:1 column:1") from None
        for position, each in enumerate(requests):
            self._check_size(position, each)
        name, quota = request.match_info["index"], self._faults.quota
        adds = any(each["action"] != "deleteObject" for each in requests)
        if quota is not None and adds and self._held.would_hold(name, requests) > quota:
            raise Refused(403, QUOTA)
        work = self._held.accept({"kind": "batch", "index": name, "requests": requests})
        ids = [each["body"]["objectID"] for each in requests]
        return web.json_response({"taskID": work["task"], "objectIDs": ids})

    def _check_size(self, position: int, request: Record) -> None:
        limit, name = self._faults.record_limit, request["body"]["objectID"]
        size = len(json.dumps(request["body"], ensure_ascii=False, separators=(",", ":")).encode())
        if size > limit:
            message = (
                f"Record at the position {position} objectID={name} is too big size={size}/{limit} bytes"
            )
            more = {} if self._faults.terse else {"position": position, "objectID": name}
            raise Refused(400, f"{message}. Please have a look at {TOO_BIG}", **more)

    async def _task(self, request: web.Request) -> web.Response:
        done = self._held.published(int(request.match_info["task"]))
        return web.json_response({"status": "published" if done else "notPublished", "pendingTask": not done})

    async def _browse(self, request: web.Request) -> web.Response:
        asked = await _parameters(request)
        index = self._index(request.match_info["index"])
        after = json.loads(base64.b64decode(asked["cursor"])) if asked.get("cursor") else ""
        size = min(int(asked.get("hitsPerPage", 1000)), 1000)
        left = sorted(id for id in index.records if id > after)
        hits = [_chosen(index.records[id], asked.get("attributesToRetrieve")) for id in left[:size]]
        answer = {**_page(hits, len(index.records), size), "query": asked.get("query", "")}
        if left[size:]:
            answer["cursor"] = base64.b64encode(json.dumps(left[size - 1]).encode()).decode()
        return web.json_response(answer)

    async def _query(self, request: web.Request) -> web.Response:
        asked = await _parameters(request)
        index = self._index(request.match_info["index"])
        words = str(asked.get("query", "")).lower().split()
        found = [each for each in index.records.values() if _matches(each, words)]
        size, page = int(asked.get("hitsPerPage", 20)), int(asked.get("page", 0))
        shown = found[page * size : (page + 1) * size]
        hits = [_chosen(each, asked.get("attributesToRetrieve")) for each in shown]
        answer = _page(hits, len(found), size)
        return web.json_response({**answer, "page": page, "query": asked.get("query", "")})

    async def _operation(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("operation") not in ("move", "copy") or not asked.get("destination"):
            raise Refused(400, "Invalid operation")
        return self._accepted(
            {
                "kind": asked["operation"],
                "index": request.match_info["index"],
                "destination": asked["destination"],
                "scope": asked.get("scope"),
            }
        )

    async def _settings(self, request: web.Request) -> web.Response:
        return web.json_response(self._index(request.match_info["index"]).settings)

    async def _set_settings(self, request: web.Request) -> web.Response:
        settings = await request.json()
        return self._accepted(
            {"kind": "settings", "index": request.match_info["index"], "settings": settings}
        )

    async def _delete(self, request: web.Request) -> web.Response:
        return self._accepted({"kind": "delete", "index": request.match_info["index"]}, when="deletedAt")

    def _accepted(self, work: Record, when: str = "updatedAt") -> web.Response:
        accepted = self._held.accept(work)
        return web.json_response({"taskID": accepted["task"], when: accepted["at"]})

    def _index(self, name: str) -> Index:
        if name not in self._held.indexes:
            raise Refused(404, f"Index {name} does not exist")
        return self._held.indexes[name]


def _checked(request: Record) -> Record:
    action, body = request["action"], request["body"]
    if action not in ACTIONS:
        raise Refused(400, f"Invalid action {action}")
    if action != "addObject" and not body.get("objectID"):
        raise Refused(
            400, f"The 'objectID' attribute is required to use action={action} near line:1 column:1"
        )
    if isinstance(body.get("_geoloc"), str):
        raise Refused(400, "_geoloc attribute cannot contains a string near line:1 column:1")
    return {"action": action, "body": identified(action, body)}


async def _parameters(request: web.Request) -> Record:
    given: Record = await request.json() if await request.read() else {}
    return {**given, **dict(parse_qsl(given.get("params", "")))}


def _page(hits: list[Record], total: int, size: int) -> Record:
    pages = -(-total // size) if size else 0
    return {"hits": hits, "nbHits": total, "page": 0, "nbPages": pages, "hitsPerPage": size, "params": ""}


def _chosen(record: Record, names: list[str] | None) -> Record:
    if not names or "*" in names:
        return record
    return {name: value for name, value in record.items() if name in ("objectID", *names)}


def _matches(record: Record, words: list[str]) -> bool:
    text = " ".join(str(value) for value in record.values()).lower().split()
    return all(any(each.startswith(word) for each in text) for word in words)


def _announce(*_: object) -> None:
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--application", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    given = parser.parse_args()
    (given.directory / restart.PID_FILE).write_text(str(os.getpid()))
    api = Api(given.application, given.key, given.directory / "journal")
    web.run_app(
        api.app(),
        host="127.0.0.1",
        port=given.port,
        access_log=None,
        print=_announce,
    )


if __name__ == "__main__":
    main()
