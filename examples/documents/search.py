"""Asks a search engine, over its own HTTP API. The relay fills the index; this only reads it."""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import aiohttp

URL = urlsplit(os.environ["SEARCH_URL"])
INDEX = URL.path.strip("/")
KEY = os.environ.get("SEARCH_KEY") or unquote(URL.password or "")
HITS = 20
SECONDS = aiohttp.ClientTimeout(total=3)

NAME = {"opensearch": "OpenSearch", "algolia": "Algolia"}.get(URL.scheme, "Meilisearch")
"""What people call the engine."""

Hit = Mapping[str, Any]


class Down(Exception):
    """The engine does not answer; the message says so for people."""


async def search(words: str) -> list[Hit]:
    """The documents that have these words, the best first; of the last word its beginning is enough."""
    return await _ENGINES[URL.scheme](words)


async def ping() -> None:
    """Raise ``Down`` if nobody is there."""
    if URL.scheme == "algolia":
        await _algolia("")
    else:
        await _ask("GET", "/health" if URL.scheme.startswith("meilisearch") else "/_cluster/health")


async def _opensearch(words: str) -> list[Hit]:
    query = {"query": words, "type": "bool_prefix", "operator": "and", "fields": ["title^3", "body"]}
    # Before the first document there is no index.
    path = f"/{INDEX}/_search?ignore_unavailable=true"
    found = await _ask("POST", path, {"size": HITS, "query": {"multi_match": query}})
    return [hit["_source"] for hit in found["hits"]["hits"]]


async def _meilisearch(words: str) -> list[Hit]:
    body = {"q": words, "limit": HITS, "matchingStrategy": "all"}
    found = await _ask("POST", f"/indexes/{INDEX}/search", body, absent={"hits": []})
    return found["hits"]


async def _algolia(words: str) -> list[Hit]:
    body = {"query": words, "hitsPerPage": HITS}
    found = await _ask("POST", f"/1/indexes/{INDEX}/query", body, absent={"hits": []})
    return found["hits"]


_ENGINES: Mapping[str, Callable[[str], Awaitable[list[Hit]]]] = {
    "opensearch": _opensearch,
    "meilisearch": _meilisearch,
    "meilisearchs": _meilisearch,
    "algolia": _algolia,
}


async def _ask(method: str, path: str, body: Any = None, absent: Any = None) -> Any:
    """Return what the engine answers, or ``absent`` if it has no such index."""
    try:
        async with (
            aiohttp.ClientSession(timeout=SECONDS, auth=_user(), headers=_headers()) as session,
            session.request(method, f"{_base()}{path}", json=body) as answer,
        ):
            if answer.status == 404 and absent is not None:
                return absent
            answer.raise_for_status()
            return await answer.json()
    except TimeoutError:
        raise Down(f"{NAME} does not answer") from None
    except aiohttp.ClientResponseError as error:
        raise Down(f"{NAME} answers {error.status} {error.message}") from None
    except aiohttp.ClientError:
        raise Down(f"{NAME} cannot be reached") from None


def _base() -> str:
    options = {name: values[-1] for name, values in parse_qs(URL.query).items()}
    if URL.scheme == "algolia":
        host = options.get("host", f"{URL.hostname}-dsn.algolia.net")
        return f"{'http' if options.get('tls') == 'false' else 'https'}://{host}"
    tls = URL.scheme == "meilisearchs" or options.get("tls") == "true"
    # Of a cluster's hosts the first will do here.
    host = URL.netloc.rpartition("@")[2].partition(",")[0]
    return f"{'https' if tls else 'http'}://{host}"


def _user() -> aiohttp.BasicAuth | None:
    if URL.scheme == "opensearch" and URL.username:
        return aiohttp.BasicAuth(unquote(URL.username), unquote(URL.password or ""))
    return None


def _headers() -> dict[str, str]:
    if URL.scheme == "algolia":
        # As it is written: the name of a host is in lower case.
        return {"x-algolia-application-id": URL.netloc.rpartition("@")[2], "x-algolia-api-key": KEY}
    return {"authorization": f"Bearer {KEY}"} if KEY and URL.scheme != "opensearch" else {}
