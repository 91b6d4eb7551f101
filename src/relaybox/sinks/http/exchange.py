"""Post requests over connections that aiohttp opens, pools and reads from.

``aiohttp.ClientSession`` spends most of its time on features that these requests never use. This module uses
the connector and the protocol below it. They are not documented and were tested with aiohttp 3.14.5; see
tests/unit/test_private_attributes.py if they change.
"""

from __future__ import annotations

import asyncio

from aiohttp import ClientRequest, ClientTimeout, ServerDisconnectedError, TCPConnector
from aiohttp.abc import AbstractResolver
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from yarl import URL

from relaybox.sinks.http.limits import limit_answers

_SIZE = 16_384
"""Bytes of an answer with its headers; receivers of events have little to say."""
_READS = 32
"""Pieces of an answer: each wakes the event loop, also one of a single byte."""
# Many servers close an idle connection after 5 s; a request sent at that moment is lost.
_KEEPALIVE = 4.0
_UNLIMITED = ClientTimeout(total=None, sock_connect=None)
# Copying a larger body costs more than a second write.
_SHORT = 65_536


class Exchange:
    """Posts to one URL in one event loop; the caller limits the time and closes connections after errors."""

    def __init__(self, url: URL, resolver: AbstractResolver, *, limit: int) -> None:
        self._connector = TCPConnector(limit=limit, keepalive_timeout=_KEEPALIVE, resolver=resolver)
        limit_answers(self._connector, size=_SIZE, reads=_READS)
        # The connector needs a request to know where to connect. This one is never sent.
        self._place = ClientRequest("POST", url, loop=asyncio.get_running_loop())
        host = self._place.headers["Host"]
        self._opening = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {host}\r\n".encode()

    async def connect(self) -> Connection:
        """Return a connection for one request, from the pool if possible."""
        return await self._connector.connect(self._place, [], _UNLIMITED)

    async def ask(
        self, connection: Connection, headers: bytes, body: bytes
    ) -> tuple[RawResponseMessage, StreamReader]:
        """Send a request (``headers`` end with an empty line); return the head and body of its answer."""
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None or transport.is_closing() or protocol.should_close:
            # The connection is closed, or holds data that cannot be the answer to this request.
            raise ServerDisconnectedError
        protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        # Do not wait until the body is sent: an answer may come earlier.
        if len(body) > _SHORT:
            transport.write(self._opening + headers)
            transport.write(body)
        else:
            transport.write(b"".join((self._opening, headers, body)))
        return await protocol.read()

    async def close(self) -> None:
        """Close all connections, including those in use."""
        await self._connector.close()


def release(connection: Connection) -> None:
    """Return the connection to the pool, or close it if part of the request is not sent yet."""
    transport = connection.transport
    if transport is not None and transport.get_write_buffer_size():
        connection.close()
    else:
        connection.release()
