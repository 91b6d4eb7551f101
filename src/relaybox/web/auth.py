"""Authenticate by a token, or by a session that a token or a login link opened.

Sessions and cursors are signed, so clients cannot forge them. A session is a cookie with the user and the
time of login; the server remembers only sessions that were ended. Its key is derived from the user's token
and the ``[web]`` secret, so sessions end when the token changes.
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
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request

from relaybox.web.problems import Problem, invalid
from relaybox.web.settings import Known, Role, token_parts

T = TypeVar("T")

COOKIE = "relaybox_session"
LIFE = 12 * 3600
MOST_ENDED = 10_000
MAC = 12
DIGITS = 18
"""Most digits of a row number, so that it fits the database's largest integer."""


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request: name, role, how they authenticated, and their session."""

    name: str
    role: Role
    by: Literal["token", "session"]
    session: str = ""

    def may(self, role: Role) -> bool:
        """True if this user may do what that role may."""
        return role != "operator" or self.role == "operator"


class Users:
    """The configured users."""

    def __init__(self, known: Iterable[Known], clock: Callable[[], float] = time.time) -> None:
        self.by_name = {user.name: user for user in known}
        # Hashes have one length, so that comparing does not reveal the token's.
        self._tokens = [
            (*token_parts(token), user) for user in self.by_name.values() for token in user.tokens
        ]
        self._clock = clock

    def by_token(self, token: str) -> Known | None:
        """Return the user of a token, unless it expired; compare with every token, each in constant time."""
        given, found, now = _hashed(token), None, self._clock()
        for hashed, until, user in self._tokens:
            if hmac.compare_digest(hashed, given) and now < until:
                found = user
        return found


class Sessions:
    """Issue and read session cookies."""

    def __init__(self, known: Iterable[Known], secret: str, clock: Callable[[], float] = time.time) -> None:
        self._keys = {
            user.name: [
                (derived(secret, "session", token, about=user.name), token_parts(token)[1])
                for token in user.tokens
            ]
            for user in known
        }
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._clock = clock

    def issue(self, name: str) -> str:
        """Return the cookie of a new session; its id is random, never one the client had before login."""
        text = _encode(msgspec.json.encode([name, secrets.token_urlsafe(18), int(self._clock())]))
        return f"{text}.{_encode(_sign(self._valid(name)[0], text))}"

    def read(self, cookie: str) -> tuple[str, str] | None:
        """Return the user's name and the session's id, or None if it is forged, expired or ended."""
        text, _, signature = cookie[:2_000].partition(".")
        try:
            name, id_, at = msgspec.json.decode(_decode(text), type=tuple[str, str, int])
            given = _decode(signature)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        # Not any(): try every key, to take the same time.
        right = [hmac.compare_digest(_sign(key, text), given) for key in self._valid(name)]
        age = self._clock() - at
        if True not in right or not -60 <= age < LIFE or _hashed(id_) in self._ended:
            return None
        return name, id_

    def _valid(self, name: str) -> list[bytes]:
        """Return the keys of the user's tokens that have not expired."""
        now = self._clock()
        return [key for key, until in self._keys.get(name, ()) if now < until]

    def end(self, session: str) -> str:
        """End a session in this process; return its hash, for the audit."""
        ended = _hashed(session)
        self.recall(ended)
        return ended

    def recall(self, ended: str) -> None:
        """Remember a session that was ended, by its hash."""
        self._ended[ended] = None
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


def authenticate(request: Request, users: Users, sessions: Sessions) -> User | None:
    """Return the user, or None without credentials; raise if a token is wrong."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, token = header.partition(" ")
        known = users.by_token(token.strip()) if scheme.lower() == "bearer" else None
        if known is None:
            raise unauthorized("The token is wrong.", error="invalid_token")
        return User(known.name, known.role, "token")
    name, session = sessions.read(request.cookies.get(COOKIE, "")) or ("", "")
    user = users.by_name.get(name)
    return None if user is None else User(user.name, user.role, "session", session)


def unauthorized(detail: str, error: str = "") -> Problem:
    """Return a 401 problem with a ``Bearer`` challenge."""
    challenge = 'Bearer realm="relaybox"' + (f', error="{error}"' if error else "")
    return Problem(401, detail, {"www-authenticate": challenge})


class Cursors:
    """Sign the place where a page ended, together with the query."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, about: str, place: object | None) -> str | None:
        """Return the cursor of a place, or None at the end of the list."""
        if place is None:
            return None
        text = str(place).encode()
        return _encode(self._mac(about, text) + text)

    def open(self, about: str, cursor: str | None, kind: Callable[[str], T]) -> T | None:
        """Return the place; raise if the cursor is forged, or belongs to another query."""
        if cursor is None:
            return None
        try:
            data = _decode(cursor)
            mac, text = data[:MAC], data[MAC:]
            if hmac.compare_digest(mac, self._mac(about, text)):
                return kind(text.decode())
        except ValueError:
            pass
        fix = "hand back the one of the page before, with the same query; or leave it out to begin again"
        raise invalid("cursor", f"it is not from this list; {fix}")

    def _mac(self, about: str, text: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"\0" + text, "sha256")[:MAC]


def number(text: str) -> int:
    """Return the number of a row; raise ``ValueError`` if the text is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise ValueError("no number of a row")
    return int(text)


def derived(secret: str, purpose: str, *tokens: str, about: str = "") -> bytes:
    """Derive a key for one purpose; scrypt makes guessing the secret and tokens expensive."""
    key = b"".join(_stretched(secret, token) for token in tokens or ("",))
    return hmac.digest(key, "\0".join(("relaybox", purpose, about)).encode(), "sha256")


@functools.lru_cache(maxsize=64)
def _stretched(secret: str, token: str) -> bytes:
    password = f"{secret}\0{token}".encode("utf-8", "replace")
    return hashlib.scrypt(password, salt=b"relaybox web", n=2**14, r=8, p=1)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode("utf-8", "replace"), "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Decode URL-safe base64 without padding; raise ``ValueError`` if it is malformed."""
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
