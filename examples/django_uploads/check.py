"""Uses the project as a visitor with a browser would, through an outage of the runner."""

import re
import time
from collections.abc import Callable
from html import unescape
from typing import NamedTuple
from urllib.request import HTTPCookieProcessor, Request, build_opener

from stage import Stage

from relaybox.demo.processes import Broken

SECONDS = 60.0
TOKEN = re.compile(r'name="csrfmiddlewaretoken" value="(.*?)"')
AWAY = "The runner cannot be reached"
HAIKU = "An old silent pond…\nA frog jumps into the pond,\nsplash! Silence again.\n"


class Row(NamedTuple):
    """An upload, as the page shows it."""

    file: str
    state: str
    words: str
    delivery: str
    error: str


ROW = re.compile("<tr " + " ".join(f'data-{name}="(.*?)"' for name in Row._fields))


class Visitor:
    """A browser, as far as it is needed here."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open = build_opener(HTTPCookieProcessor()).open

    def page(self) -> str:
        """Return what the visitor sees."""
        with self._open(self._url) as answer:
            return answer.read().decode()

    def rows(self) -> dict[str, Row]:
        """The uploads by the names of their files."""
        return {row[0]: Row(*map(unescape, row)) for row in ROW.findall(self.page())}

    def upload(self, name: str, content: bytes) -> None:
        """Fill in the form and send it."""
        [token] = TOKEN.findall(self.page())
        parts = [
            f'content-disposition: form-data; name="csrfmiddlewaretoken"\r\n\r\n{token}'.encode(),
            f'content-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + content,
        ]
        body = b"".join(b"--boundary\r\n%b\r\n" % part for part in parts) + b"--boundary--\r\n"
        headers = {"content-type": "multipart/form-data; boundary=boundary"}
        self._open(Request(self._url, body, headers)).close()


def check(stage: Stage) -> None:
    """Say each step that came to its end; raises ``Broken`` at the first that does not."""
    visitor = Visitor(stage.url)

    def until(text: str, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition():
            stage.check()
            if time.monotonic() > began + SECONDS:
                raise Broken(f"not after {SECONDS:g} s: {text}; there is {[*visitor.rows().values()]}")
            time.sleep(0.1)
        print(f"ok {time.monotonic() - began:5.1f} s  {text}", flush=True)

    def shows(file: str, **expected: str) -> bool:
        row = visitor.rows()[file]
        return all(value in getattr(row, name) for name, value in expected.items())

    def both_show(**expected: str) -> bool:
        return shows("one.txt", **expected) and shows("two.txt", **expected)

    visitor.upload("haiku.txt", HAIKU.encode())
    until(
        "a file is stored, the runner hears of it and counts 13 words",
        lambda: shows("haiku.txt", state="processed", words="13", delivery="delivered"),
    )
    visitor.upload("dot.png", b"\x89PNG\r\n\x1a\n")
    until(
        "the runner refuses what is not text, and the page says why",
        lambda: shows("dot.png", state="stored", delivery="failed", error="it is not text"),
    )
    stage.stop("runner")
    visitor.upload("one.txt", b"while the runner is away")
    visitor.upload("two.txt", b"while the runner is away")
    until(
        "the runner is stopped: two more files wait, and the page says why",
        lambda: both_show(state="stored", delivery="waiting") and AWAY in visitor.page(),
    )
    stage.start_runner()
    until(
        "the runner is back: both are delivered and processed",
        lambda: both_show(state="processed", words="5", delivery="delivered") and AWAY not in visitor.page(),
    )
