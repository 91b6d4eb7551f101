"""One kind of POST and its answer, over connections that aiohttp opens, keeps and reads from.

``aiohttp.ClientSession`` prepares for any request: redirects, cookies, proxies, compression, uploads, timers,
tracing. For a request that is always the same that is most of its cost. What is used here are the parts below
it: the connector with its pool, resolver and TLS, and the protocol of a connection with its parser. They are
not documented and were tried with aiohttp 3.14.5; tests/unit/test_private_attributes.py says what to do when
they change.
"""

from __future__ import annotations

import asyncio

from aiohttp import ClientRequest, ClientTimeout, ServerDisconnectedError, TCPConnector
from aiohttp.abc import AbstractResolver
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from yarl import URL

# Many servers close an idle connection after 5 s, and a request sent in that moment is lost.
_KEEPALIVE = 4.0
_UNLIMITED = ClientTimeout(total=None, sock_connect=None)
# To copy more than this costs more than a second write.
_SHORT = 65_536


class Exchange:
    """Posts to one URL over no more than ``limit`` connections at once, on one event loop.

    Limits of time are the caller's, who closes the connection wherever something goes wrong.
    """

    def __init__(self, url: URL, resolver: AbstractResolver, *, limit: int) -> None:
        self._connector = TCPConnector(limit=limit, keepalive_timeout=_KEEPALIVE, resolver=resolver)
        # All go to the same place: one request, never sent, stands for them where a connection is asked for.
        self._place = ClientRequest("POST", url, loop=asyncio.get_running_loop())
        host = self._place.headers["Host"]
        self._opening = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {host}\r\n".encode()

    async def connect(self) -> Connection:
        """A connection for one request: a kept one, else a new one."""
        return await self._connector.connect(self._place, [], _UNLIMITED)

    async def ask(
        self, connection: Connection, headers: bytes, body: bytes
    ) -> tuple[RawResponseMessage, StreamReader]:
        """Send a request; its answer as far as the headers, and the stream of the rest.

        ``headers`` are whole lines, with the empty one that ends them.
        """
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None or transport.is_closing() or protocol.should_close:
            # Closed; or something came already, which cannot be the answer.
            raise ServerDisconnectedError
        protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        # Nobody waits until it is sent: an answer may come before that.
        if len(body) > _SHORT:
            transport.write(self._opening + headers)
            transport.write(body)
        else:
            transport.write(b"".join((self._opening, headers, body)))
        while True:
            message, content = await protocol.read()
            if message.code // 100 != 1 or message.code == 101:
                return message, content

    async def close(self) -> None:
        """Give up the connections, also those in use."""
        await self._connector.close()


def release(connection: Connection) -> None:
    """Keep it for the next request, unless something of this one or of its answer is still on the way."""
    transport = connection.transport
    if transport is not None and transport.get_write_buffer_size():
        connection.close()
    else:
        connection.release()
