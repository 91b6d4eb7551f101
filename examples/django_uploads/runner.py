"""The runner: a program of its own, which knows nothing of Django and gets signed webhooks.

It counts the words of each stored file, reports their number, and remembers the events it is done with.
"""

import hashlib
import hmac
import json
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from relaybox.wire.signature import verify

SECRET, TOKEN = os.environ["RUNNER_SECRET"], os.environ["RUNNER_TOKEN"]
DATABASE = os.environ["RUNNER_DATABASE"]
ADDRESS = urlsplit(os.environ["RUNNER_URL"])
SECONDS = 10


class Refused(Exception):
    """This file will never do; the message says why."""


def receive(headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
    """The status to answer with, and what is wrong."""
    authorized = hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {TOKEN}".encode())
    if not authorized or not verify(body, headers, SECRET, now=time.time()):
        return 401, "the token or the signature is wrong"
    event, event_id = json.loads(body), headers["webhook-id"]
    if event["type"] != "file.stored" or is_done(event_id):
        # Of no interest, or here before: either way there is nothing left to do.
        return 204, ""
    try:
        process(event["data"])
    except Refused as error:
        return 422, str(error)
    except OSError as error:
        return 503, f"the project cannot be reached: {error}"
    remember(event_id)
    return 204, ""


def process(file: Mapping[str, Any]) -> None:
    """Fetch the file, count its words and report them."""
    with urlopen(file["content"], timeout=SECONDS) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise Refused("the content is not what was stored")
    try:
        words = len(content.decode().split())
    except UnicodeDecodeError:
        raise Refused("it is not text in UTF-8, so it has no words to count") from None
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    report = Request(file["report"], json.dumps({"words": words}).encode(), headers)
    urlopen(report, timeout=SECONDS).close()
    print(f"{file['name']}: {words} words", flush=True)


def is_done(event_id: str) -> bool:
    """True if the event was here before."""
    with closing(sqlite3.connect(DATABASE)) as database:
        return database.execute("SELECT 1 FROM done WHERE id = ?", [event_id]).fetchone() is not None


def remember(event_id: str) -> None:
    """Note it after the work. A runner that dies in between does it once more, which changes nothing."""
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("INSERT INTO done VALUES (?) ON CONFLICT DO NOTHING", [event_id])


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self) -> None:
        """Receive an event."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, text = receive(self.headers, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


if __name__ == "__main__":
    with closing(sqlite3.connect(DATABASE)) as created, created:
        created.execute("CREATE TABLE IF NOT EXISTS done (id TEXT PRIMARY KEY)")
    ThreadingHTTPServer((ADDRESS.hostname, ADDRESS.port), Handler).serve_forever()
