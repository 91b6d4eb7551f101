"""How the imitation of Meilisearch reads what it is asked, and answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from msgspec import json

from tests.servers.meilisearch_document import Failed
from tests.servers.meilisearch_state import Index

LONGEST_UID = 400
_UID = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)


def answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.encode(body), status=status, content_type="application/json")


def number(text: Any, name: str, of: str) -> int:
    if not re.fullmatch(r"[0-9]+", str(text), re.ASCII):
        said = f"Invalid value in parameter `{name}`: could not parse `{text}` as a positive integer"
        raise Failed(f"invalid_{of}_{name}", said)
    return int(text)


def page(items: list[Any], asked: Mapping[str, Any], of: str) -> dict[str, Any]:
    offset, limit = (
        number(asked.get(name, usual), name, of) for name, usual in (("offset", 0), ("limit", 20))
    )
    return {"results": items[offset : offset + limit], "offset": offset, "limit": limit, "total": len(items)}


def listed(index: Index, asked: Mapping[str, Any], fields: Any, ids: list[str] | None) -> dict[str, Any]:
    documents = index.documents
    keys = list(documents) if ids is None else [key for key in dict.fromkeys(ids) if key in documents]
    found = page(keys, asked, "document")
    wanted = fields_of(fields)
    found["results"] = [shown(json.decode(documents[key]), wanted) for key in found["results"]]
    return found


def fields_of(asked: Any) -> set[str] | None:
    names = asked.split(",") if isinstance(asked, str) else asked
    return None if names is None or "*" in names else set(names)


def shown(document: dict[str, Any], fields: set[str] | None) -> dict[str, Any]:
    return document if fields is None else {name: document[name] for name in document if name in fields}


def uid_of(request: web.Request) -> str:
    return checked_uid(request.match_info["uid"])


def checked_uid(uid: Any) -> str:
    if not isinstance(uid, str) or not _UID.fullmatch(uid) or len(uid) > LONGEST_UID:
        said = (
            f"`{uid}` is not a valid index uid. Index uid can be an integer or a string containing only "
            "alphanumeric characters, hyphens (-) and underscores (_)."
        )
        raise Failed("invalid_index_uid", said)
    return uid
