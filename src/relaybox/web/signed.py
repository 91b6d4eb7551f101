"""Signed texts that clients hand back as they got them, and cannot make up: sessions and cursors.

A session is a cookie that says who logged in, and when; nothing is kept for it but what was ended. The key of
a user's sessions is made of their token and the ``[web]`` secret: with the token, they end. A cursor says
where a list goes on.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from relaybox.web.problems import Problem, invalid
from relaybox.web.settings import Known

T = TypeVar("T")

COOKIE = "relaybox_session"
LIFE = 12 * 3600
MOST_ENDED = 10_000
MAC = 12
DIGITS = 18
"""Fewer than a database's largest number has."""


class Session(msgspec.Struct, array_like=True, frozen=True):
    """Who logged in, what tells this login from every other, and when it was."""

    name: str
    id: str
    at: int


class Sessions:
    """Makes and reads the cookies of sessions."""

    def __init__(self, known: Iterable[Known], secret: str, clock: Callable[[], float] = time.time) -> None:
        self._keys = {
            user.name: tuple(derived(secret, "session", token, about=user.name) for token in user.tokens)
            for user in known
        }
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._clock = clock

    def issue(self, name: str) -> str:
        """Return the cookie of a new session; never one that somebody had before they logged in."""
        text = _encode(msgspec.json.encode(Session(name, secrets.token_urlsafe(18), int(self._clock()))))
        return f"{text}.{_encode(_sign(self._keys[name][0], text))}"

    def read(self, cookie: str) -> Session | None:
        """Return the session, if it was made here, is not over, and was not ended."""
        text, _, signature = cookie[:2_000].partition(".")
        try:
            session = msgspec.json.decode(_decode(text), type=Session)
            given = _decode(signature)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        keys = self._keys.get(session.name, ())
        # Not any(): every key is tried, whichever was right.
        right = [hmac.compare_digest(_sign(key, text), given) for key in keys]
        age = self._clock() - session.at
        if True not in right or not -60 <= age < LIFE or _hash(session.id) in self._ended:
            return None
        return session

    def end(self, session: str) -> str:
        """Let nobody use it any more in this process; return a hash that stands for it in the audit."""
        self.recall(_hash(session))
        return _hash(session)

    def recall(self, ended: str) -> None:
        """Know of a session that was ended, by its hash."""
        self._ended[ended] = None
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


class Cursors:
    """Seals the place where a page ended, together with the question it was an answer to."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, about: str, place: object | None) -> str | None:
        """Return the cursor of a place; None: the list is at its end."""
        if place is None:
            return None
        text = str(place).encode()
        return _encode(self._mac(about, text) + text)

    def open(self, about: str, cursor: str | None, kind: Callable[[str], T]) -> T | None:
        """Return the place; raise where the cursor was not made here, or for another question."""
        if cursor is None:
            return None
        try:
            data = _decode(cursor)
            mac, text = data[:MAC], data[MAC:]
            if hmac.compare_digest(mac, self._mac(about, text)):
                return kind(text.decode())
        except ValueError:
            pass
        raise _wrong()

    def _mac(self, about: str, text: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"\0" + text, "sha256")[:MAC]


def number(text: str) -> int:
    """Return a place that is a number; raise ``ValueError`` if it is not."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise ValueError("no number of a row")
    return int(text)


def derived(secret: str, purpose: str, *tokens: str, about: str = "") -> bytes:
    """Return a key for one purpose; each guess at what it is made of costs as much as making it."""
    key = b"".join(_stretched(secret, token) for token in tokens or ("",))
    return hmac.digest(key, "\0".join(("relaybox", purpose, about)).encode(), "sha256")


@functools.lru_cache(maxsize=64)
def _stretched(secret: str, token: str) -> bytes:
    password = f"{secret}\0{token}".encode("utf-8", "replace")
    return hashlib.scrypt(password, salt=b"relaybox web", n=2**14, r=8, p=1)


def _wrong() -> Problem:
    fix = "hand back the one of the page before, with the same query; or leave it out to begin anew"
    return invalid("cursor", f"it is none of this list; {fix}")


def _hash(session: str) -> str:
    return hashlib.sha256(session.encode("utf-8", "replace")).hexdigest()


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode("utf-8", "replace"), "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Raise ``ValueError`` where it is not base64."""
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
