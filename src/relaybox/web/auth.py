"""Who asks: by a token, by a session that a token opened, or this host where there are no users."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from starlette.requests import Request

from relaybox.web.problems import Problem
from relaybox.web.settings import Known, Role
from relaybox.web.signed import COOKIE, Sessions

By: TypeAlias = Literal["token", "session", "local"]

LOCAL = "local"
"""The actor where no users are configured."""


@dataclass(frozen=True, slots=True)
class User:
    """Who asks, and what they may do."""

    name: str
    role: Role

    def may(self, role: Role | None) -> bool:
        """Whether that role, or none, is all that is needed."""
        return role != "operator" or self.role == "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """A user, how they proved it, and the session they have."""

    user: User
    by: By
    session: str = ""


class Users:
    """The users that are configured."""

    def __init__(self, known: Iterable[Known]) -> None:
        self._by_name = {user.name: user for user in known}
        self._tokens = [(_digest(token), user) for user in self._by_name.values() for token in user.tokens]

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def by_token(self, token: str) -> User | None:
        """Return whose token it is; every one is compared, each in constant time."""
        given, found = _digest(token), None
        for digest, user in self._tokens:
            if hmac.compare_digest(digest, given):
                found = user
        return _user(found)

    def named(self, name: str) -> User | None:
        """Return the user of that name."""
        return _user(self._by_name.get(name))


def _user(known: Known | None) -> User | None:
    return None if known is None else User(known.name, known.role)


def _digest(token: str) -> bytes:
    # Of one length, so that the comparison does not tell the token's.
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def authenticate(request: Request, users: Users, sessions: Sessions) -> Caller | None:
    """Who asks; None: somebody without credentials. Raises where credentials are given and wrong."""
    if not users:
        return Caller(User(LOCAL, "operator"), "local", LOCAL)
    header = request.headers.get("authorization")
    if header is not None:
        return _by_header(header, users)
    cookie = request.cookies.get(COOKIE)
    session = None if cookie is None else sessions.read(cookie)
    if session is None:
        return None
    user = users.named(session.name)
    return None if user is None else Caller(user, "session", session.id)


def _by_header(header: str, users: Users) -> Caller:
    scheme, _, token = header.partition(" ")
    found = users.by_token(token.strip()) if scheme.lower() == "bearer" else None
    if found is None:
        raise unauthorized("The token is wrong.", error="invalid_token")
    return Caller(found, "token")


def unauthorized(detail: str, error: str = "") -> Problem:
    """Credentials are missing or wrong."""
    challenge = f'Bearer realm="relaybox"{f", error={chr(34)}{error}{chr(34)}" if error else ""}'
    return Problem(401, detail, {"www-authenticate": challenge})
