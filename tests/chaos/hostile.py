"""A receiver that answers as badly as HTTP allows: ``python -m tests.chaos.hostile 'interim answers'``.

It prints its port. It is a process of its own, so that its work is not taken for that of a relay.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress

_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FINE = "a fine answer"
ANSWERS: dict[str, tuple[bytes, bytes]] = {
    FINE: (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b""),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2000),
    "interim answers with headers": (b"", b"HTTP/1.1 103 E\r\n%b\r\n" % (b"a: b\r\n" * 100) * 100),
    "empty lines": (b"", b"\r\n" * 30_000),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 10_000),
    "one header": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65_536),
    "a chunk's extension": (_CHUNKED + b"1;", b"a=b;" * 16_000),
    "chunks": (_CHUNKED, b"1\r\nx\r\n" * 10_000),
    "a body": (b"HTTP/1.1 500 No\r\nContent-Length: 100000000000\r\n\r\n", b"x" * 65_536),
    "single bytes": (b"HTTP/1.1 500 No\r\nContent-Length: 100000000000\r\n\r\n", b"x"),
}
"""By what has no end: the beginning, and what follows again and again."""


async def _serve(start: bytes, more: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: ([0-9]+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                writer.write(start)
                while more:
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(*ANSWERS[sys.argv[1]]))
