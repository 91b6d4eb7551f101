"""Sessions: a signed cookie that says who logged in, and when; nothing is kept for it but what was ended.

The key of a user's sessions is made of their token and the ``[web]`` secret: with the token, they end.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.hosts import over_tls
from relaybox.web.settings import Known

COOKIE = "relaybox_session"
LIFE = 12 * 3600
MOST_ENDED = 10_000


class _Content(msgspec.Struct, array_like=True):
    name: str
    id: str
    at: int


@dataclass(frozen=True, slots=True)
class Session:
    """Who logged in, and what tells this login from every other."""

    name: str
    id: str


class Sessions:
    """Makes and reads cookies."""

    def __init__(self, known: Iterable[Known], secret: str, clock: Callable[[], float] = time.time) -> None:
        self._keys = {
            user.name: tuple(derived(secret, "session", token, about=user.name) for token in user.tokens)
            for user in known
        }
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._clock = clock

    def issue(self, name: str) -> str:
        """The cookie of a new session; never one that somebody had before they logged in."""
        content = msgspec.json.encode(_Content(name, secrets.token_urlsafe(18), int(self._clock())))
        text = _encode(content)
        return f"{text}.{_encode(_sign(self._keys[name][0], text))}"

    def read(self, cookie: str) -> Session | None:
        """The session, if it was made here, is not over, and was not ended."""
        text, _, signature = cookie[:2_000].partition(".")
        try:
            content = msgspec.json.decode(_decode(text), type=_Content)
            given = _decode(signature)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        keys = self._keys.get(content.name, ())
        # Not any(): every key is tried, whichever was right.
        right = [hmac.compare_digest(_sign(key, text), given) for key in keys]
        age = self._clock() - content.at
        if True not in right or not -60 <= age < LIFE or _hash(content.id) in self._ended:
            return None
        return Session(content.name, content.id)

    def end(self, session: str) -> str:
        """Let nobody use it any more in this process; a hash that stands for it in the audit."""
        self.recall(_hash(session))
        return _hash(session)

    def recall(self, ended: str) -> None:
        """Know of a session that was ended, by its hash."""
        self._ended[ended] = None
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


def derived(secret: str, purpose: str, *tokens: str, about: str = "") -> bytes:
    """A key for one purpose; each guess at what it is made of costs as much as making it."""
    key = b"".join(_stretched(secret, token) for token in tokens or ("",))
    return hmac.digest(key, "\0".join(("relaybox", purpose, about)).encode(), "sha256")


@functools.lru_cache(maxsize=64)
def _stretched(secret: str, token: str) -> bytes:
    password = f"{secret}\0{token}".encode("utf-8", "replace")
    return hashlib.scrypt(password, salt=b"relaybox web", n=2**14, r=8, p=1)


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Give the browser its session; an empty one takes it away."""
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=LIFE if cookie else 0,
        path=str(request.scope.get("root_path", "")).rstrip("/") or "/",
        secure=over_tls(request),
        httponly=True,
        samesite="strict",
    )


def _hash(session: str) -> str:
    return hashlib.sha256(session.encode("utf-8", "replace")).hexdigest()


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode("utf-8", "replace"), "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
