"""Limit what an answer may cost, so that a hostile server cannot stall other destinations.

aiohttp limits the number and size of headers. It does not limit interim (1xx) answers, the extensions of
chunks, the size of an answer, or how many small pieces it comes in. This module uses parts of aiohttp that
are not documented; see tests/unit/test_private_attributes.py if they change.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

from aiohttp import ClientError, TCPConnector
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

_HEAD = 65_536
"""Bytes up to the end of the final answer's headers."""
_INTERIM = 8
"""Interim answers before the final one."""
_SLICE = 1024
"""Bytes that are parsed at once before the final answer: one read may hold thousands of interim answers."""


class AnswerTooLong(ClientError):
    """An answer reached a limit before it was complete."""


def limit_answers(connector: TCPConnector, *, size: int, reads: float = math.inf) -> None:
    """End an answer of more than ``size`` bytes, framing included, or of more than ``reads`` pieces."""
    loop = connector._loop
    connector._factory = partial(LimitedHandler, loop, size, reads)  # type: ignore[assignment]


class LimitedHandler(ResponseHandler):
    """Reads the answers of one connection up to the limits, and ignores interim answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, reads: float) -> None:
        super().__init__(loop)
        self._size = size
        self._most_reads = reads
        self._count_anew()

    def _count_anew(self) -> None:
        self._reads = self._received = self._interim = 0
        self._final = False

    def set_response_params(self, **params: Any) -> None:
        """Take the settings of the next request, whose answer is counted from zero."""
        self._count_anew()
        super().set_response_params(**params)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Queue a final answer, and count an interim one."""
        code = data[0].code
        if code // 100 == 1 and code != 101:
            self._interim += 1
        else:
            self._final = True
            super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes of one read, up to the limits."""
        rest = data[: max(self._size - self._received, 0)]
        self._reads += 1
        self._received += len(data)
        # Parse an empty read too: aiohttp continues so where it paused the parser.
        parsing = True
        while parsing and self._interim <= _INTERIM and not self._exception:
            step = len(rest) if self._final else _SLICE
            super().data_received(rest[:step])
            rest = rest[step:]
            parsing = bool(rest)
        if not self._exception and (reason := self._excess()):
            self._give_up(AnswerTooLong(reason))

    def _excess(self) -> str | None:
        if self._interim > _INTERIM:
            return f"more than {_INTERIM} interim answers"
        most = self._size if self._final else min(self._size, _HEAD)
        if self._received > most:
            return f"more than {most} bytes"
        return f"more than {self._most_reads} pieces" if self._reads > self._most_reads else None

    def _give_up(self, error: AnswerTooLong) -> None:
        payload, transport = self._payload, self.transport
        self.set_exception(error)
        if payload is not None and not payload.is_eof():
            payload.set_exception(error)
        if transport is not None:
            transport.abort()
