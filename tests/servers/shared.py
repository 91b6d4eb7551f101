"""One server of each kind for a whole test run, whatever the number of its processes.

The process at the top of a run owns a host. A test process asks the host for a server. The host starts it
when it is first asked, and answers all others with the same URL. Each server is started by a thread of its
own, which waits until the run ends: a server is killed together with the thread that started it, so no server
outlives a run, even one that is killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Client, Connection, Listener

from tests.servers import (
    algolia,
    base,
    kafka,
    mariadb,
    meilisearch,
    moto,
    nats,
    opensearch,
    pgbouncer,
    postgres15,
    postgres18,
    rabbitmq,
    redis,
)

VARIABLE = "RELAYBOX_SERVER_HOST"
"""Names the host's socket for the processes below the one that owns it."""

Start = Callable[[], AbstractContextManager[str]]


KINDS: dict[str, Start] = {
    "PostgreSQL 18": postgres18.server,
    "PostgreSQL 15": postgres15.server,
    "PgBouncer": lambda: pgbouncer.server(url("PostgreSQL 18")),
    "MariaDB": mariadb.server,
    "Redis": redis.server,
    "RabbitMQ": rabbitmq.server,
    "NATS": nats.server,
    "Kafka": kafka.server,
    "moto": moto.server,
    "OpenSearch": opensearch.server,
    "Meilisearch": meilisearch.server_url,
    "Algolia": algolia.server_url,
}


def url(kind: str) -> str:
    """Return the URL of the run's server of a kind; raise Unavailable if it cannot be started."""
    with Client(os.environ[VARIABLE], "AF_UNIX") as host:
        host.send(kind)
        answer = host.recv()
    if isinstance(answer, Exception):
        raise answer
    return str(answer)


class Host:
    """Starts servers for the processes of a run."""

    def __init__(self, kinds: Mapping[str, Start] = KINDS) -> None:
        self._kinds = kinds
        self._directory = base.workspace()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._urls: dict[str, Future[str]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Listen, and tell the processes that are started from now on where."""
        base.remove_abandoned()
        address = str(self._directory.__enter__() / "host")
        self._listener = Listener(address, "AF_UNIX")
        self._above = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = address
        threading.Thread(target=self._listen, daemon=True).start()

    def stop(self) -> None:
        """End every server."""
        if self._above is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = self._above
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._directory.__exit__(None, None, None)

    def _listen(self) -> None:
        while not self._ended.is_set():
            # A process that was killed leaves half a connection.
            with suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):
            answer = self._url(connection.recv())
            connection.send(answer.exception() or answer.result())

    def _url(self, kind: str) -> Future[str]:
        with self._lock:
            if kind not in self._urls:
                self._urls[kind] = Future()
                thread = threading.Thread(target=self._run, args=[kind], name=kind)
                self._threads.append(thread)
                thread.start()
            return self._urls[kind]

    def _run(self, kind: str) -> None:
        try:
            with self._kinds[kind]() as started:
                self._urls[kind].set_result(started)
                self._ended.wait()
        except Exception as error:
            if self._urls[kind].done():
                raise
            # Only a server that cannot be had skips its tests; anything else fails them.
            known = isinstance(error, base.Unavailable)
            self._urls[kind].set_exception(error if known else RuntimeError(f"{kind}: {error!r}"))
