"""What a receiver may answer: HTTP, something like it, and nothing of the kind."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tests.properties import values

STATUS_LINES = (
    *(b"HTTP/1.1 200 OK", b"HTTP/1.0 204 No Content", b"HTTP/9.9 200 OK", b"HTTP/1.1 2000 OK"),
    *(b"HTTP/1.1 -1 OK", b"HTTP/1.1 abc", b"HTTP/1.1", b"HTTP/1.1 99 Low", b"http/1.1 200 ok", b"200 OK"),
    *(b"SSH-2.0-OpenSSH_9.2", b"HTTP/1.1 200 " + b"x" * 9000, b"HTTP/1.1 200 \xff\xfe\x00"),
    *(b"HTTP/1.1  200  OK", b"\r\nHTTP/1.1 200 OK", b"<html>", b"\x16\x03\x01\x02\x00"),
)
HEADERS = (
    *(b"Content-Length: -1", b"Content-Length: 5, 5", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: abc", b"Content-Length: 5\r\nContent-Length: 7", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: nonsense", b"Content-Encoding: gzip"),
    *(b"Content-Encoding: \xff", b"Connection: close", b"Connection: upgrade\r\nUpgrade: websocket"),
    *(b"Set-Cookie: a=b; Max-Age=nonsense", b"Location: http://169.254.169.254/", b"Location: \x00"),
    *(b"X: " + b"y" * 9000, b"X" * 9000 + b": y", b"no colon at all", b": no name", b"Bad Name: x"),
    *(b"X: a\r\n folded", b"X: \x01\x02", b"Content-Type: text/html; charset=nonsense", b"Trailer: x"),
    *(b"X-%d: y" % number for number in range(3)),
)
RETRY_AFTER = (
    *(b"0", b"1", b"-5", b"1e9", b"99999999999999999999999", b"abc", b"", b"nan", b"inf", b"1.5", b"\xb2"),
    *(b"Wed, 21 Oct 2015 07:28:00 GMT", b"Fri, 31 Dec 9999 23:59:59 GMT", b"Mon, 99 Foo 20x5 99:99:99 ABC"),
    *(b"Thu, 01 Jan 1970 00:00:00 +9999", b"0000-00-00", b"1" * 5000),
)
CHUNKS = (
    *(b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"zz\r\nhello\r\n", b"-5\r\nhello\r\n"),
    *(b"FFFFFFFFFFFFFFFFFF\r\nx", b"5;ext=" + b"y" * 500 + b"\r\nhello\r\n0\r\n\r\n"),
    *(b"0\r\nTrailer: x\r\n\r\n", b"5\r\nhelloXX0\r\n\r\n", b""),
)


class Answer(NamedTuple):
    """The bytes in the pieces in which they are sent, and what is done then."""

    pieces: list[bytes]
    then: str
    """``wait`` for the next request, ``close``, ``reset``."""


def answer(r: Random) -> Answer:
    """Any answer."""
    whole = _bytes(r)
    cut = r.random()
    if cut < 0.15:
        whole = whole[: r.randint(0, len(whole))]
    pieces = [whole]
    if cut > 0.95:
        places = sorted(r.randint(0, len(whole)) for _ in range(3))
        pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    # What is not whole, or not HTTP, has no end that could be waited for.
    return Answer(pieces, r.choice(("close", "close", "reset", "wait")))


def _bytes(r: Random) -> bytes:
    match r.randrange(10):
        case 0:
            return r.randbytes(r.choice((0, 1, 10, 300)))
        case 1:
            return r.choice(STATUS_LINES) + r.choice((b"\r\n\r\n", b"\n\n", b"", b"\r\n"))
    status = r.choice(
        (b"HTTP/1.1 %d %s" % (r.randint(100, 999), r.choice((b"", b"Some Phrase"))), r.choice(STATUS_LINES))
    )
    headers = [r.choice(HEADERS) for _ in range(r.choice((0, 0, 1, 2, 5)))]
    if r.random() < 0.4:
        headers.append(b"Retry-After: " + r.choice(RETRY_AFTER))
    if r.random() < 0.02:
        headers += [b"X-%d: y" % number for number in range(2000)]
    body = r.choice(
        (b"", b"fine", r.randbytes(50), values.bad_text(r).encode("utf-8", "surrogatepass"), b"x" * 100_000)
    )
    if r.random() < 0.7:
        length = len(body) + r.choice((0, 0, 0, 0, 1, -1, 1000))
        headers.append(b"Content-Length: %d" % length)
    elif b"Transfer-Encoding: chunked" in headers:
        body = r.choice(CHUNKS)
    r.shuffle(headers)
    return b"\r\n".join([status, *headers, b"", b""]) + body
