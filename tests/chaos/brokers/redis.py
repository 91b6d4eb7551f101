"""Redis Streams: a place is a stream."""

from __future__ import annotations

from functools import partial
from uuid import UUID, uuid4

import redis

from tests.chaos.brokers.base import DOWN, SILENT, Harm, Local, Message, nothing
from tests.servers import redis as server
from tests.servers.restart import Restartable


class Redis(Local):
    """A durable server. Adding to a stream creates it, so deleting one causes no trouble."""

    name = "redis"

    def __init__(self, running: Restartable) -> None:
        super().__init__(running)
        self._stream = ""
        self._gone: list[str] = []
        self.harms = {
            "killed": Harm(running.kill, running.start, DOWN, shut=True),
            "ended": Harm(self._end, running.start, DOWN, shut=True),
            "stopped": Harm(self._stop, self._silence.close, SILENT),
            "full": Harm(partial(self._limit, 1), partial(self._limit, 0), "maxmemory", shut=True),
            "deleted": Harm(self._delete, nothing),
        }

    @property
    def url(self) -> str:
        return f"{server.url_of(self._running)}?stream={self._stream}"

    def make(self) -> None:
        self._stream, self._gone = f"chaos-{uuid4()}", []

    def read(self) -> list[Message]:
        with self._client() as client:
            entries = [fields for name in (*self._gone, self._stream) for _, fields in client.xrange(name)]
        return [Message(UUID(fields[b"event-id"].decode()), fields[b"data"]) for fields in entries]

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(server.url_of(self._running))

    def _limit(self, size: int) -> None:
        with self._client() as client:
            client.config_set("maxmemory", size)

    def _delete(self) -> None:
        """Rename the stream: for those that add to it, all of it is gone at once; we can still read it."""
        with self._client() as client:
            if client.exists(self._stream):
                self._gone.append(f"{self._stream}-{len(self._gone)}")
                client.rename(self._stream, self._gone[-1])


KIND, OPTIONS = Redis, {}
