"""The search engine: a new one or somebody's own, with an index for the documents."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relaybox import Destination
from relaybox.core.outcome import Unavailable
from relaybox.demo.processes import Broken
from relaybox.errors import ConfigError
from relaybox.search.engine import open_engine

ROOT = Path(__file__).parents[2]
INDEX = "documents"


class Engine:
    """An engine as the service gets it. ``server`` can be stopped and started, if it is new."""

    def __init__(self, name: str, url: str, key: str = "", server: Any = None) -> None:
        self.name = name
        self.url = url
        self.key = key
        self.is_new = server is not None
        self.runs = True
        self._server = server

    @property
    def where(self) -> str:
        """Its host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def kill(self) -> None:
        """Its data stays."""
        self._server.stop()
        self.runs = False

    def start(self) -> None:
        """Start it again, with what it had."""
        self._server.start()
        self.runs = True


@contextmanager
def started(url: str | None, name: str | None) -> Iterator[Engine]:
    """The one at the URL; without one a new one, as the tests of this repository start it."""
    if url is not None:
        with own(url) as engine:
            yield engine
        return
    sys.path.insert(0, str(ROOT))
    from tests.servers import base

    with ExitStack() as stack:
        reasons = []
        for one in [name] if name else ENGINES:
            try:
                engine = stack.enter_context(ENGINES[one]())
                break
            except base.Unavailable as reason:
                print(f"{one} cannot be had here: {reason}", flush=True)
                reasons.append(str(reason))
        else:
            raise Broken(f"no search engine: {'; '.join(reasons)}; give one of yours with --search URL")
        yield engine


@contextmanager
def new_opensearch() -> Iterator[Engine]:
    """OpenSearch, of the archive that the tests use."""
    from tests.servers import opensearch

    print("OpenSearch starts; the first time, it is fetched.", flush=True)
    with opensearch.node() as server:
        # A search finds at once what was written; else it takes up to a second.
        yield Engine(
            "OpenSearch", f"opensearch://127.0.0.1:{server.port}/{INDEX}?refresh=true", server=server
        )


@contextmanager
def new_meilisearch() -> Iterator[Engine]:
    """The imitation of Meilisearch that the tests use."""
    from tests.servers import meilisearch

    with meilisearch.imitation() as server:
        url = meilisearch.destination_url(server, INDEX)
        yield Engine("Meilisearch (imitated)", url, server.key, server)


@contextmanager
def new_algolia() -> Iterator[Engine]:
    """The imitation of Algolia that the tests use."""
    from tests.servers import algolia

    with algolia.server() as server:
        yield Engine("Algolia (imitated)", server.url_of(INDEX), server.key, server)


ENGINES: dict[str, Callable[[], Any]] = {
    "opensearch": new_opensearch,
    "meilisearch": new_meilisearch,
    "algolia": new_algolia,
}
"""What can be started here, the best first."""


@contextmanager
def own(url: str) -> Iterator[Engine]:
    """Somebody's engine. The index must be new: in an old one are documents of others."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        # As Meilisearch's own tools write it.
        parts = parts._replace(scheme=parts.scheme.replace("http", "meilisearch"))
    if not parts.path.strip("/"):
        parts = parts._replace(path=f"/{INDEX}")
    key = os.environ.get("SEARCH_KEY") or os.environ.get("MEILISEARCH_KEY", "")
    name = {"opensearch": "OpenSearch", "algolia": "Algolia"}.get(parts.scheme, "Meilisearch")
    engine, index = Engine(name, parts.geturl(), key), parts.path.strip("/")
    try:
        there = asyncio.run(_with(engine, lambda asked: asked.present([index])))
    except (ConfigError, Unavailable) as reason:
        raise Broken(str(reason)) from None
    if there:
        raise Broken(f"the index {index!r} is there already; name a new one in the path of the URL")
    try:
        yield engine
    finally:
        asyncio.run(_with(engine, lambda asked: asked.drop(index)))


async def _with(engine: Engine, ask: Callable[[Any], Any]) -> Any:
    asked = open_engine(Destination("search", engine.url, auth=engine.key or None))
    try:
        return await ask(asked)
    finally:
        await asked.close()
