"""Search engines behind a network that can fail, and the faults of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from tests.chaos.proxy import Proxy
from tests.servers import algolia, meilisearch, opensearch, restart

Harm = Callable[[], None]
ENGINES = ("meilisearch", "algolia", "opensearch")


@dataclass(frozen=True)
class Subject:
    """An engine; ``sink`` leads to it through ``network``."""

    name: str
    server: restart.Restartable
    network: Proxy
    sink: Callable[[str], str]
    """The URL of a destination, for the name of an index."""
    auth: str | None
    harms: dict[str, Harm] = field(default_factory=dict)
    """What can be made of it, until ``heal``."""
    heal: Harm = lambda: None
    full: str = ""
    """What it says when it takes no more documents, in lower case."""
    guarded: bool = False
    """Whether it refuses a document that is older than what it has."""

    def kill(self) -> None:
        """Kill it, and start it again with its data."""
        self.server.kill()
        self.server.start()


@contextmanager
def engine(name: str) -> Iterator[Subject]:
    """Start one."""
    with _ENGINES[name]() as subject:
        yield subject


@contextmanager
def _meilisearch() -> Iterator[Subject]:
    with meilisearch.imitation() as server, Proxy("127.0.0.1", server.port) as network:
        writes = "^POST /indexes"
        yield Subject(
            "meilisearch",
            server,
            network,
            lambda index: f"meilisearch://127.0.0.1:{network.port}/{index}?create_index=true",
            server.key,
            {
                "throttled": lambda: server.fault(
                    requests=({"status": 429, "after": 1, "count": 3, "on": writes},)
                ),
                "unavailable": lambda: server.fault(requests=({"status": 503, "count": 10, "on": ""},)),
                "lost answers": lambda: server.fault(requests=({"drop": "after", "count": 6, "on": writes},)),
                "failing tasks": lambda: server.fault(tasks=({"code": "internal", "count": 6},)),
                "a queue that stands still": lambda: server.fault(paused=True),
                "full at 247": lambda: server.fault(quota=247),
            },
            server.fault,
            "maximum database size has been reached",
        )


@contextmanager
def _algolia() -> Iterator[Subject]:
    with algolia.server() as server, Proxy("127.0.0.1", server.port) as network:
        place = f"host=127.0.0.1:{network.port}&tls=false&create_index=true"
        yield Subject(
            "algolia",
            server,
            network,
            lambda index: f"algolia://{algolia.APPLICATION}/{index}?{place}",
            server.key,
            {
                "throttled": lambda: server.faults(status=429, times=3, path="/batch", retry_after="1"),
                "unavailable": lambda: server.faults(status=503, times=10),
                "full at 247": lambda: server.faults(quota=247),
            },
            lambda: server.faults(times=0, quota=None),
            "exceeded your record quota",
        )


@contextmanager
def _opensearch() -> Iterator[Subject]:
    with opensearch.node() as server, Proxy("127.0.0.1", server.port) as network:
        yield Subject(
            "opensearch",
            server,
            network,
            lambda index: f"opensearch://127.0.0.1:{network.port}/{index}?create_index=true",
            None,
            guarded=True,
        )


_ENGINES: dict[str, Callable[[], AbstractContextManager[Subject]]] = {
    "meilisearch": _meilisearch,
    "algolia": _algolia,
    "opensearch": _opensearch,
}
