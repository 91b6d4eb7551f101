"""The settings of the ``[web]`` table."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, TypeAlias

from relaybox.core.redact import parse_rules
from relaybox.core.values import (
    Secret,
    Setting,
    Table,
    choice,
    known_only,
    optional,
    parse_list,
    parse_name,
    parse_secret,
    parsed,
    wrong,
)
from relaybox.errors import ConfigError, shorten

Role: TypeAlias = Literal["viewer", "operator"]

SHORTEST = 16
"""Least characters of a token or the secret: it must not be guessable, even from a signature."""

LOCAL = "local"
"""The only user, an operator, if no users are configured."""

TOKEN = "RELAYBOX_WEB_TOKEN"
"""The environment variable with the token of ``LOCAL``."""

RESERVED = frozenset({LOCAL, "unknown", "health", "relay", "application"})
"""Names that the audit and rows use for actors that are not users."""

HASH = "sha256:"
"""Begins a token of which only the hash is in the settings."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Known:
    """A user with the tokens revealed; several while one replaces another."""

    name: str
    role: Role
    tokens: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class UserSettings:
    """One ``[web.users.NAME]`` table."""

    name: str
    _: KW_ONLY
    token: Setting[str | Secret, Secret] = Setting(parse_secret, "")
    role: Setting[Role, Role] = Setting(choice(Role), "viewer")

    @property
    def _where(self) -> str:
        return f"web: user {shorten(self.name)}: "

    def __post_init__(self) -> None:
        parse_name(self.name, f"{self._where}name")
        if self.name.casefold() in RESERVED:
            raise ConfigError(f"{self._where}the audit calls others so; choose another name")

    @classmethod
    def from_mapping(cls, name: str, mapping: Mapping[str, Any]) -> Self:
        """Create it from its table."""
        where = f"web: user {shorten(name)}"
        settings = known_only(mapping, ("token", "role"), where, {"password": "did you mean 'token'?"})
        if "token" not in settings:
            variable = f"{re.sub('[^A-Z0-9]', '_', str(name).upper())[:40]}_TOKEN"
            raise ConfigError(f"{where} has no token; write one, such as token = 'env:{variable}'")
        return cls(name, **settings)

    def reveal(self) -> Known:
        """Return the user with the tokens; raise if one is missing or too short."""
        tokens = _revealed(self.token, f"{self._where}token", str.split)
        for token in tokens:
            if token.startswith(HASH) and parsed(token_parts, token) is None:
                fix = f"write {HASH} and 64 hexadecimal digits, and :2027-12-31 if it expires after that day"
                raise ConfigError(f"{self._where}token holds a malformed hash; {fix}")
        return Known(self.name, self.role, tokens)


def token_parts(token: str) -> tuple[str, float]:
    """Return the hash of a token, and when it expires; raise ``ValueError`` if it is a malformed hash."""
    if not token.startswith(HASH):
        return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest(), math.inf
    match = re.fullmatch(r"([0-9a-f]{64})(?::(\d{4}-\d\d-\d\d))?", token.removeprefix(HASH), re.ASCII)
    if match is None:
        raise ValueError(token)
    last = datetime.fromisoformat(match[2]).replace(tzinfo=UTC) if match[2] else None
    return match[1], math.inf if last is None else (last + timedelta(days=1)).timestamp()


def _revealed(secret: Secret, setting: str, parts: Callable[[str], list[str]]) -> tuple[str, ...]:
    found = tuple(parts(secret.reveal_for(setting)))
    if not found or min(map(len, found)) < SHORTEST:
        fix = f"write {SHORTEST} characters or more, such as `openssl rand -hex 32` prints"
        raise ConfigError(f"{setting} is too short; {fix}")
    return found


def local_user() -> Known:
    """Return the only user if none are configured, with the token of the environment or a random one."""
    if TOKEN not in os.environ:
        return Known(LOCAL, "operator", (secrets.token_urlsafe(32),))
    return Known(LOCAL, "operator", _revealed(parse_secret(f"env:{TOKEN}", TOKEN), TOKEN, str.split))


def _host(value: str, setting: str) -> str:
    if not isinstance(value, str) or not (address_of(value) or _NAME.fullmatch(value)):
        raise wrong(setting, value, "write an address or a name to listen on, such as '127.0.0.1'")
    return value


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address, or None if the text is not one."""
    return parsed(ipaddress.ip_address, text)


def _port(value: int, setting: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65_535:
        raise wrong(setting, value, "write a port, 0 to 65535; 0 takes one that is free")
    return value


def _hosts(value: Iterable[str], setting: str) -> tuple[str, ...]:
    names = parse_list(value, setting, "['outbox.example.org']")
    for name in names:
        if not isinstance(name, str) or not (address_of(name.strip("[]")) or _NAME.fullmatch(name)):
            raise wrong(setting, name, "write a host's name without scheme and port, as outbox.example.org")
    return tuple(name.strip("[]").lower() for name in names)


def _users(value: Any, setting: str) -> tuple[UserSettings, ...]:
    if isinstance(value, tuple) and all(isinstance(user, UserSettings) for user in value):
        return value
    if not isinstance(value, Mapping):
        raise wrong(setting, type(value).__name__, "write each as a [web.users.NAME] table")
    return tuple(UserSettings.from_mapping(name, table) for name, table in value.items())


@dataclass(frozen=True)
class WebSettings:
    """The ``[web]`` table."""

    host: Setting[str, str] = Setting(_host, "127.0.0.1")
    port: Setting[int, int] = Setting(_port, 8811)
    hosts: Setting[Iterable[str], tuple[str, ...]] = Setting(_hosts, ())
    redact: Setting[Iterable[str], tuple[str, ...]] = Setting(parse_rules, ())
    secret: Setting[str | Secret | None, Secret | None] = Setting(optional(parse_secret), None)
    users: Setting[Mapping[str, Any], tuple[UserSettings, ...]] = Setting(_users, Table({}))

    _where = "web: "

    @classmethod
    def of(cls, table: Mapping[str, Any], **more: Any) -> Self:
        """Create it from the ``[web]`` table; ``more`` overrides the table."""
        fixes = {"token": "write it in a [web.users.NAME] table"}
        names = [item.name for item in fields(cls)]
        return cls(**known_only(table, names, "[web]", fixes) | known_only(more, names, "the web", fixes))

    def reveal(self) -> tuple[Known, ...]:
        """Return the users with their tokens; raise if a token is missing, or two users share one."""
        self.revealed_secret()
        known = tuple(user.reveal() for user in self.users)
        owners: dict[str, str] = {}
        for user in known:
            for token in user.tokens:
                if token.startswith(HASH) and self.secret is None:
                    # Sessions are signed with the tokens: anyone who read the hash could forge one.
                    raise ConfigError(
                        "web: the hash of a token is not a secret; also write secret = 'env:NAME'"
                    )
                owner = owners.setdefault(token_parts(token)[0], user.name)
                if owner != user.name:
                    both = f"{owner!r} and {user.name!r}"
                    raise ConfigError(f"web: users {both} have the same token; give each their own")
        return known

    def revealed_secret(self) -> str:
        """Return the secret that is part of every signing key, or an empty text if there is none."""
        return "" if self.secret is None else _revealed(self.secret, "web: secret", lambda text: [text])[0]

    @property
    def address(self) -> str:
        """Return the URL that it is served at."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def check_binding(self, *, require_users: bool = False) -> None:
        """Raise if other hosts could reach it although no users are configured."""
        problem = "no users are configured; add a [web.users.NAME] table with a token and a role"
        if require_users and not self.users:
            raise ConfigError(f"web: --require-users, and {problem}")
        if not self.users and not is_loopback(self.host):
            reached = f"host = {self.host!r} is reachable from elsewhere"
            raise ConfigError(f"web: {reached} and {problem}, or listen on 127.0.0.1")


def is_loopback(host: str) -> bool:
    """True if a name or an address means this host."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = address_of(host.partition("%")[0])
    return address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback
