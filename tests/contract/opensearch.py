"""What the tests of OpenSearch share: an engine, an index, and the server's own API to look behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from relaybox.config import Destination
from relaybox.engine import Change
from relaybox.outcome import Reject, Retry, Unavailable
from relaybox.sink import Answer
from relaybox.sinks.opensearch import OpenSearchEngine, open_engine

STRICT = {"mappings": {"dynamic": "strict", "properties": {"id": {"type": "keyword"}, "n": {"type": "long"}}}}
"""Of an index that takes ``document``, and nothing else."""


def document(key: str, n: object) -> dict[str, Any]:
    return {"id": key, "n": n}


def index(key: str, n: object, version: int = 1) -> Change:
    return Change(key, document(key, n), version)


def delete(key: str, version: int = 1) -> Change:
    return Change(key, None, version)


@asynccontextmanager
async def opened(url: str, patience: str = "10s", **options: Any) -> AsyncIterator[OpenSearchEngine]:
    engine = open_engine(Destination("search", url, timeout=patience, options=options))
    try:
        yield engine
    finally:
        await engine.close()


class Api:
    """The server's own API, as anybody else uses it."""

    def __init__(self, url: str) -> None:
        self.base = url.replace("opensearch://", "http://")

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.base}{path}", sent, headers, method=method), timeout=30) as answer:
            return json.load(answer)

    def exists(self, name: str) -> bool:
        return bool(self("GET", f"/{name}?ignore_unavailable=true"))

    def concrete(self, name: str) -> list[str]:
        return sorted(self("GET", f"/{name}/_alias"))


def kinds(answers: Sequence[Answer]) -> list[type]:
    return [type(answer) for answer in answers]


def reason_of(answer: Answer) -> str:
    assert isinstance(answer, Retry | Reject | Unavailable)
    return answer.reason


async def ids_of(engine: OpenSearchEngine, index: str) -> list[str]:
    return sorted([key async for page in engine.scan(index) for key in page])


class OnOpenSearch:
    """A server, an engine, and an index of each test's own."""

    @pytest.fixture
    def api(self, opensearch_url: str) -> Api:
        return Api(opensearch_url)

    @pytest.fixture
    async def engine(self, opensearch_url: str) -> AsyncIterator[OpenSearchEngine]:
        async with opened(opensearch_url) as engine:
            yield engine

    @pytest.fixture
    def name(self, api: Api) -> Iterator[str]:
        """Of an index that does not exist yet; what a test made of it is deleted."""
        name = f"documents{uuid4().hex}"
        yield name
        for concrete in api("GET", f"/{name}*?expand_wildcards=all"):
            api("DELETE", f"/{concrete}")

    @pytest.fixture
    def strict(self, api: Api, name: str) -> str:
        """An index that somebody made, of that very name."""
        api("PUT", f"/{name}", STRICT)
        return name
