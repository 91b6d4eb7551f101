"""Server-sent events that tell open pages to fetch their content again.

One round of bounded queries serves all clients of the process; none runs without clients. A failed round is
reported and tried again. A stream ends after ``LIFE`` seconds, because some servers wait for open
connections before they shut down; browsers reconnect by themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from relaybox.operate.admin import Admin, Stats
from relaybox.operate.why import is_alive

ROUND = 2.0
"""Seconds between two rounds."""
BEAT = 15.0
"""Seconds of silence after which a stream sends a comment, to keep the connection alive."""
LIFE = 25.0
MOST = 100
"""Most clients of one process."""
LATER = 60_000
"""Milliseconds after which a refused client may connect again."""

TOPICS = ("stats",)
COUNTED = ("due", "scheduled", "parked", "sending", "delivered", "failed", "retrying")

log = logging.getLogger("relaybox.web")


class Live:
    """The round that all clients of one process share."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._last = ""
        self.rounds = 0
        self.closed = False

    @property
    def full(self) -> bool:
        """True if no further client is accepted."""
        return self.closed or len(self._listeners) >= MOST

    async def stream(self, admin: Admin) -> AsyncIterator[str]:
        """Yield the messages for one client."""
        if self.full:
            # Other clients came after the endpoint checked.
            yield f"retry: {LATER}\n\n"
            return
        # A queue of one: a slow client misses rounds, and does not delay the others.
        news: asyncio.Queue[str | None] = asyncio.Queue(1)
        self._listeners.add(news)
        if self._task is None:
            self._task = asyncio.create_task(self._run(admin), name="relaybox live")
        ends = asyncio.get_running_loop().time() + LIFE
        try:
            yield f"retry: 1000\n\n{self._last}"
            while (left := ends - asyncio.get_running_loop().time()) > 0:
                try:
                    message = await asyncio.wait_for(news.get(), min(BEAT, left))
                except TimeoutError:
                    message = ": still here\n\n"
                if message is None:
                    return
                yield message
        finally:
            self._listeners.discard(news)
            if not self._listeners:
                self._stop()

    def close(self) -> None:
        """End every stream, and accept no more."""
        self.closed = True
        for listener in self._listeners:
            if listener.full():
                listener.get_nowait()
            listener.put_nowait(None)
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._last = ""

    async def _run(self, admin: Admin) -> None:
        while True:
            try:
                message = _message("stats", digest(await admin.stats()))
            except Exception as error:
                log.warning("live: the database does not answer: %s", type(error).__name__)
                message = _message("trouble", {"reason": "The database does not answer."})
            self.rounds += 1
            if message != self._last:
                self._last = message
                for listener in self._listeners:
                    if not listener.full():
                        listener.put_nowait(message)
            await asyncio.sleep(ROUND)


def digest(stats: Stats) -> dict[str, Any]:
    """Return a few numbers, and a mark that changes with anything that a page shows."""
    seen = [
        [one.name, repr(one.place and (one.place.paused, one.place.circuit)), repr(one.counts.capped)]
        + [getattr(one.counts, name) for name in COUNTED]
        for one in stats.destinations
    ]
    alive = sorted(relay.name for relay in stats.relays if is_alive(relay))
    mark = hashlib.sha256(json.dumps([seen, alive]).encode()).hexdigest()[:16]
    total = stats.total
    return {"mark": mark, "pending": total.due + total.scheduled + total.parked, "failed": total.failed}


def _message(event: str, data: dict[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"


async def live(request: Request) -> Response:
    """Stream ``GET /live?topic=stats``."""
    if request.query_params.get("topic", "stats") not in TOPICS:
        return PlainTextResponse(f"topic: one of {', '.join(TOPICS)}\n", 400)
    of_app: Live = request.app.live
    if of_app.full:
        busy = "Too many pages are open; this one is not updated by itself.\n"
        return PlainTextResponse(busy, 503, {"retry-after": "60"})
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    stream = of_app.stream(request.state.admin)
    return StreamingResponse(stream, headers=headers, media_type="text/event-stream")
