"""An endpoint that streams for ever, or a gigabyte of zeros as gzip, costs a relay next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

SCRIPT = """
import asyncio, multiprocessing, resource, sys, zlib
from relaybox import Destination
from relaybox.sinks.http import HttpSink
from relaybox.testing.sink_contract import deliveries

kind = sys.argv[1]
packed = zlib.compressobj(wbits=31)
bomb = packed.compress(bytes(80 * 2**20)) + packed.flush()

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    encoding = b"content-encoding: gzip\\r\\n" if kind == "bomb" else b""
    writer.write(b"HTTP/1.1 500 Oops\\r\\n" + encoding + b"transfer-encoding: chunked\\r\\n\\r\\n")
    chunk = bomb[:65536] if kind == "bomb" else b"x" * 65536
    try:
        while True:
            writer.write(b"%x\\r\\n%b\\r\\n" % (len(chunk), chunk))
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()

async def serve(port):
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()

async def main(port):
    url = f"http://127.0.0.1:{port}/"
    sink = HttpSink(Destination("runner", url, allow=["127.0.0.0/8"], timeout="60s"))
    await sink.send(deliveries(400))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = await sink.send(deliveries(400))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(len(answers), {type(answer).__name__ for answer in answers}, round(grown))
    assert grown < 30, f"{grown:.0f} MB more"
    await sink.close()

mine, its = multiprocessing.Pipe()
server = multiprocessing.Process(target=lambda: asyncio.run(serve(its)), daemon=True)
server.start()
asyncio.run(main(mine.recv()))
server.kill()
"""


@pytest.mark.parametrize("kind", ["stream", "bomb"])
def test_memory_stays_flat(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("400 {'Retry'} ")
