"""Who asks: by a token, by a session that a token opened, or this host where there are no users."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from relaybox.web.problems import Problem
from relaybox.web.settings import Known, Role
from relaybox.web.signed import COOKIE, Sessions

LOCAL = "local"
"""The actor where no users are configured."""


@dataclass(frozen=True, slots=True)
class User:
    """Who asks, what they may do, how they proved it, and the session they have."""

    name: str
    role: Role
    by: Literal["token", "session", "local"]
    session: str = ""

    def may(self, role: Role) -> bool:
        """True if that role is all that is needed."""
        return role != "operator" or self.role == "operator"


class Users:
    """The users that are configured."""

    def __init__(self, known: Iterable[Known]) -> None:
        self._by_name = {user.name: user for user in known}
        self._tokens = [(_digest(token), user) for user in self._by_name.values() for token in user.tokens]

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def by_token(self, token: str) -> Known | None:
        """Return whose token it is; every one is compared, each in constant time."""
        given, found = _digest(token), None
        for digest, user in self._tokens:
            if hmac.compare_digest(digest, given):
                found = user
        return found

    def named(self, name: str) -> Known | None:
        """Return the user of that name."""
        return self._by_name.get(name)


def _digest(token: str) -> bytes:
    # Of one length, so that the comparison does not tell the token's.
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def authenticate(request: Request, users: Users, sessions: Sessions) -> User | None:
    """Return who asks; None: somebody without credentials. Raise where credentials are given and wrong."""
    if not users:
        return User(LOCAL, "operator", "local", LOCAL)
    header = request.headers.get("authorization")
    if header is not None:
        return _by_header(header, users)
    session = sessions.read(request.cookies.get(COOKIE, ""))
    user = None if session is None else users.named(session.name)
    return None if session is None or user is None else User(user.name, user.role, "session", session.id)


def _by_header(header: str, users: Users) -> User:
    scheme, _, token = header.partition(" ")
    user = users.by_token(token.strip()) if scheme.lower() == "bearer" else None
    if user is None:
        raise unauthorized("The token is wrong.", error="invalid_token")
    return User(user.name, user.role, "token")


def unauthorized(detail: str, error: str = "") -> Problem:
    """Credentials are missing or wrong."""
    challenge = 'Bearer realm="relaybox"' + (f', error="{error}"' if error else "")
    return Problem(401, detail, {"www-authenticate": challenge})
