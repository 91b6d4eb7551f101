"""The configuration of an outbox: destinations, routes, and the files they are read from."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar

from relaybox.core.commands import command
from relaybox.core.schemes import SCHEMES, SEARCH_ENGINES
from relaybox.core.values import (
    Duration,
    Secret,
    Setting,
    Table,
    choice,
    duration_from,
    identifier,
    is_reference,
    key_lengths,
    known_only,
    mask_url,
    normalize_url,
    optional,
    parse_count,
    parse_duration,
    parse_factor,
    parse_flag,
    parse_jitter,
    parse_name,
    parse_names,
    parse_networks,
    parse_percent,
    parse_rate,
    parse_secret,
    parse_size,
    parse_table,
    read_toml,
    reveal_database,
    wrong,
)
from relaybox.errors import ConfigError, UnknownDestination, did_you_mean, shorten

__all__ = [
    "DEFAULT_DATABASE", "Backoff", "ConfigWarning", "Destination", "Route", "Secret", "Settings",
    "database_source", "find_file", "mask_url", "needs_postgresql", "normalize_url", "parse_duration",
    "read_routes",
]  # fmt: skip

Jitter: TypeAlias = float | Literal["full"]
Ordering: TypeAlias = Literal["aggregate", "tenant", "event_type", "none"]
Format: TypeAlias = Literal["json", "flat", "cloudevents", "payload"]
OnFailed: TypeAlias = Literal["block", "skip"]
OnUnrouted: TypeAlias = Literal["raise", "store"]
Function: TypeAlias = Callable[..., Any]

SHORTEST_KEY = 24
"""Bytes of a secret that signs, as Standard Webhooks asks for."""

DEFAULT_DATABASE = "sqlite:///relaybox.db"

_MEANT = "did you mean %r?"


class ConfigWarning(UserWarning):
    """A setting is valid but probably not what was intended."""


@dataclass(frozen=True)
class Backoff:
    """How long to wait after an attempt: ``base * factor ** (attempts - 1)``, capped, with jitter."""

    base: Setting[Duration, float] = Setting(parse_duration, 1.0)
    cap: Setting[Duration, float] = Setting(parse_duration, 3600.0)
    factor: Setting[float, float] = Setting(parse_factor, 2.0)
    jitter: Setting[Jitter, Jitter] = Setting(parse_jitter, 0.1)

    _where = "backoff: "

    def __post_init__(self) -> None:
        if self.cap < self.base:
            raise ConfigError(f"backoff: cap = {self.cap:g}s is below base = {self.base:g}s; raise the cap")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build it from a table such as ``{ base = "60s", cap = "1h", factor = 2, jitter = 0.1 }``."""
        return cls(**known_only(mapping, (item.name for item in fields(cls)), "backoff"))


def _backoff(value: Backoff | Mapping[str, Any], setting: str) -> Backoff:
    if isinstance(value, Backoff):
        return value
    try:
        return Backoff.from_mapping(value)
    except ConfigError as error:
        # The table does not know which destination it belongs to.
        error.args = (f"{setting.removesuffix('backoff')}{error}",)
        raise


@dataclass(frozen=True, repr=False)
class Destination:
    """A named place events go: a sink, and the policy of its deliveries.

    Durations are stored in seconds, ``rate_limit`` in events a second. ``ordered`` defaults to true for
    search indexes, else to false. ``on_failed`` decides about a key after its head failed for good; it
    defaults to ``block`` if ``ordered``, else ``skip``. ``options`` belong to the sink and may also be in its
    URL's query. ``once`` is for functions: they run in one transaction with the inbox's mark of their event.
    """

    name: str
    sink: str
    _: KW_ONLY
    once: Setting[bool, bool] = Setting(parse_flag, False)
    # The default of None is resolved in __post_init__.
    ordered: Setting[bool | None, bool] = Setting(optional(parse_flag), None)  # type: ignore[arg-type]
    ordering: Setting[Ordering | Function, Ordering | Function] = Setting(
        choice(Ordering, or_function=True), "aggregate"
    )
    on_failed: Setting[OnFailed | None, OnFailed | None] = Setting(optional(choice(OnFailed)), None)
    max_attempts: Setting[int, int] = Setting(parse_count, 5)
    timeout: Setting[Duration, float] = Setting(duration_from(0.001), 30.0)
    backoff: Setting[Backoff | Mapping[str, Any], Backoff] = Setting(_backoff, Backoff())
    concurrency: Setting[int, int] = Setting(parse_count, 50)
    rate_limit: Setting[str | float | None, float | None] = Setting(optional(parse_rate), None)
    lease: Setting[Duration, float] = Setting(duration_from(1), 60.0)
    batch_size: Setting[int, int] = Setting(parse_count, 100)
    poll_interval: Setting[Duration, float] = Setting(duration_from(0.001), 1.0)
    retention: Setting[Duration, float] = Setting(parse_duration, 604_800.0)
    dead_letter: Setting[str | None, str | None] = Setting(optional(parse_name), None)
    format: Setting[Format | Function, Format | Function] = Setting(choice(Format, or_function=True), "json")
    secret: Setting[str | Secret | None, Secret | None] = Setting(optional(parse_secret), None)
    auth: Setting[str | Secret | None, Secret | None] = Setting(optional(parse_secret), None)
    allow: Setting[Iterable[str], tuple[str, ...]] = Setting(parse_networks, ())
    options: Setting[Mapping[str, Any], Mapping[str, Any]] = Setting(parse_table, Table({}))

    @property
    def _where(self) -> str:
        return f"destination {shorten(self.name)}: "

    @cached_property
    def handed_over(self) -> bool:
        """True if no relay sends to this destination: Debezium reads its rows from the database's log."""
        return self.scheme == "debezium"

    @property
    def scheme(self) -> str:
        """Return the scheme of the sink's URL, which selects the kind of sink; empty if it cannot be read."""
        try:
            return self.url.partition(":")[0].lower()
        except ConfigError:
            return ""

    @property
    def url(self) -> str:
        """Return the sink's URL, which ``sink`` may refer to: ``env:NAME`` or ``file:PATH``."""
        if not is_reference(self.sink):
            return self.sink
        return Secret(self.sink).reveal_for(f"destination {self.name!r}: sink")

    def __post_init__(self) -> None:
        parse_name(self.name, f"{self._where}name")
        self._check_sink()
        if self.ordered is None:
            object.__setattr__(self, "ordered", self.scheme in SEARCH_ENGINES)
        if self.handed_over:
            self._check_handed_over()
        if self.on_failed is None:
            object.__setattr__(self, "on_failed", "block" if self.ordered else "skip")
        if self.lease < self.timeout:
            seen = f"lease {self.lease:g}s is shorter than timeout {self.timeout:g}s"
            fix = (
                "a slow send then depends on extensions of its lease; make the lease longer than the timeout"
            )
            warnings.warn(f"{self._where}{seen}: {fix}", ConfigWarning, stacklevel=3)
        if self.secret is not None and self.scheme in ("http", "https"):
            self._check_strength(self.secret)

    def _check_sink(self) -> None:
        setting = f"{self._where}sink"
        if not isinstance(self.sink, str) or not self.sink:
            raise wrong(setting, self.sink, "write a URL such as 'https://example.org/events'")
        if is_reference(self.sink):
            self._check_reference(setting)
        elif self.scheme not in SCHEMES:
            scheme, colon, _ = self.sink.partition(":")
            if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
                # Not shown: it may be a secret.
                fix = "write a URL such as https://example.org/events"
                raise ConfigError(f"{setting} has no known scheme; {fix}")
            raise ConfigError(f"{setting}: {scheme!r} is not a known scheme{did_you_mean(scheme, SCHEMES)}")
        if self.once and self.scheme != "handler":
            fix = "only functions can run once; other receivers need an inbox of their own"
            raise wrong(f"{self._where}once", self.once, fix)
        if self.scheme in ("http", "https") and not re.match(r"\w+://[^/?#]", self.url):
            raise wrong(setting, mask_url(self.sink), "name a host, as in 'https://example.org/events'")

    def _check_reference(self, setting: str) -> None:
        """Raise if the URL decides how events are stored: processes that cannot read it store them too."""
        scheme = self.scheme
        if scheme and scheme not in SCHEMES:
            fix = "write a URL such as https://example.org/events there"
            raise ConfigError(f"{setting} = {self.sink!r} has no known scheme; {fix}")
        if scheme in SEARCH_ENGINES and self.ordered is None:
            raise ConfigError(f"{setting} = {self.sink!r}: also write ordered = true or ordered = false")
        if scheme in ("debezium", "handler"):
            raise ConfigError(f"{setting} = {self.sink!r}: write {scheme}: here; it is not a secret")

    def _check_strength(self, secret: Secret) -> None:
        try:
            lengths = key_lengths(secret.reveal())
        except ConfigError:
            # It may be missing here: only relays need it.
            return
        if lengths and min(lengths) < SHORTEST_KEY:
            seen = f"{self._where}secret has a key of {min(lengths)} bytes, which might be guessed"
            fix = f"use {SHORTEST_KEY} or more; {command('secret new')} prints one"
            warnings.warn(f"{seen}: {fix}", ConfigWarning, stacklevel=4)

    def _check_handed_over(self) -> None:
        if self.sink.partition(":")[2] not in ("", "//"):
            fix = "write 'debezium:' alone; `relaybox debezium` prints where Debezium reads and sends"
            raise wrong(f"{self._where}sink", mask_url(self.sink), fix)
        if self.options:
            raise ConfigError(f"{self._where}options: a debezium destination has none; leave them out")
        if self.format not in ("json", "payload"):
            raise ConfigError(f"{self._where}format: Debezium sends the bare payload; leave it out")
        if self.dead_letter is not None:
            raise ConfigError(f"{self._where}dead_letter: nothing fails here, Debezium sends; leave it out")

    def check_secrets(self) -> None:
        """Raise ``ConfigError`` if a secret is missing in this process."""
        sink = Secret(self.sink) if is_reference(self.sink) else None
        secrets = {"sink": sink, "secret": self.secret, "auth": self.auth}
        for setting, secret in secrets.items():
            if secret is not None:
                secret.reveal_for(f"destination {self.name!r}: {setting}")

    @classmethod
    def from_mapping(cls, name: str, mapping: Mapping[str, Any]) -> Self:
        """Build a destination from a ``[destinations.NAME]`` table."""
        where = f"destination {shorten(name)}"
        known = (item.name for item in fields(cls) if item.name != "name")
        settings = known_only(mapping, known, where, dict.fromkeys(("url", "endpoint"), _MEANT % "sink"))
        if "sink" not in settings:
            raise ConfigError(f"{where} has no sink; write one, such as sink = 'https://example.org/events'")
        return cls(name, **settings)

    def __repr__(self) -> str:
        return f"Destination({self.name!r}, {mask_url(self.sink)!r})"


@dataclass(frozen=True)
class Route:
    """Which events go where: ``Route("file.*", to="runner")``; ``*`` stands for any run of characters.

    ``rollout`` is the percentage of aggregates it takes. Events of a ``shadow`` route are stored, claimed and
    settled like any other, but not sent.
    """

    events: Setting[str | Iterable[str], tuple[str, ...]] = Setting(parse_names, ())
    to: Setting[str | Iterable[str], tuple[str, ...]] = Setting(parse_names, ())
    _: KW_ONLY
    rollout: Setting[float, float] = Setting(parse_percent, 100.0)
    shadow: Setting[bool, bool] = Setting(parse_flag, False)

    @property
    def _where(self) -> str:
        # ``events`` is set first; while it is being checked, the route has no name yet.
        events = ", ".join(map(shorten, self.__dict__.get("events", ())))
        return f"route {events}: " if events else "route: "

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build a route from a ``[[routes]]`` table."""
        fixes = dict.fromkeys(("event", "match", "pattern"), _MEANT % "events")
        return cls(**known_only(mapping, (item.name for item in fields(cls)), "a route", fixes))


_Item = TypeVar("_Item")


def _several(kind: type[_Item]) -> Callable[[Iterable[_Item], str], tuple[_Item, ...]]:
    def parse(value: Iterable[_Item], setting: str) -> tuple[_Item, ...]:
        if not isinstance(value, Iterable):
            raise ConfigError(f"{setting}: give a list of {kind.__name__} objects")
        items = tuple(value)
        for item in items:
            if not isinstance(item, kind):
                raise wrong(setting, item, f"give {kind.__name__} objects")
        return items

    return parse


def _prefix(value: str, setting: str) -> str:
    return identifier(value, setting) if value else ""


@dataclass(frozen=True, repr=False)
class Settings:
    """The complete, consistent configuration of an outbox."""

    database: Setting[str, str] = Setting(normalize_url, DEFAULT_DATABASE)
    destinations: Setting[Iterable[Destination], tuple[Destination, ...]] = Setting(_several(Destination), ())
    routes: Setting[Iterable[Route], tuple[Route, ...]] = Setting(_several(Route), ())
    _: KW_ONLY
    schema: Setting[str | None, str | None] = Setting(optional(identifier), None)
    prefix: Setting[str, str] = Setting(_prefix, "")
    unrouted: Setting[OnUnrouted, OnUnrouted] = Setting(choice(OnUnrouted), "raise")
    notify: Setting[bool, bool] = Setting(parse_flag, True)
    max_payload: Setting[str | int, int] = Setting(parse_size, 1_048_576)
    inbox_window: Setting[Duration, float] = Setting(duration_from(1), 604_800.0)
    idempotency_window: Setting[Duration, float] = Setting(duration_from(1), 2_592_000.0)
    namespace: Setting[str, str] = Setting(_prefix, "")
    canary: Setting[Duration | None, float | None] = Setting(optional(duration_from(1)), None)
    canary_destination: Setting[str | None, str | None] = Setting(optional(parse_name), None)
    app: Setting[str | None, str | None] = Setting(optional(parse_name), None)
    web: Setting[Mapping[str, Any], Mapping[str, Any]] = Setting(parse_table, Table({}))

    _where = ""

    def __post_init__(self) -> None:
        names = [destination.name for destination in self.destinations]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"destinations: two are called {name!r}; rename one")
        handed_over = [one.name for one in self.destinations if one.handed_over]
        for route in self.routes:
            for name in route.to:
                _check_exists(f"{route._where}to", name, names)
            if route.shadow and (unseen := [name for name in handed_over if name in route.to]):
                fix = f"Debezium sends every event that is written for {unseen[0]!r}; remove shadow"
                raise wrong(f"{route._where}shadow", route.shadow, fix)
        following = {one.name: one.dead_letter for one in self.destinations}
        for name, dead_letter in following.items():
            if dead_letter is not None:
                _check_dead_letter(name, dead_letter, following, handed_over)
        self._check_canary(handed_over)

    def _check_canary(self, handed_over: Collection[str]) -> None:
        to = self.canary_destination
        if to is None and self.canary is not None:
            raise ConfigError("canary has no destination; name one with canary_destination = '…'")
        if to is not None and self.canary is None:
            raise wrong("canary_destination", to, "also set how often, as in canary = '60s'")
        # It need not exist: a handler may be registered after the settings are read.
        if to in handed_over:
            raise wrong("canary_destination", to, "no relay sees what Debezium sends")

    def destination(self, name: str) -> Destination:
        """Return the destination of that name. Raise ``UnknownDestination``."""
        known = {one.name: one for one in self.destinations}
        if name not in known:
            raise UnknownDestination(name, known)
        return known[name]

    @classmethod
    def load(cls, path: Path | None, env: Mapping[str, str], database: str | None = None) -> Self:
        """Read the file that ``find_file`` finds, if any.

        The database is the argument, else RELAYBOX_DATABASE, the file's, DATABASE_URL, or an SQLite file.
        Each may be ``env:NAME`` or ``file:PATH``.
        """
        table = _read(path, env)
        destinations = table.pop("destinations", {})
        if not isinstance(destinations, dict):
            raise wrong("destinations", destinations, "write each as a [destinations.NAME] table")
        routes = _routes(table.pop("routes", []))
        setting, value = _named_database(database, env, table.pop("database", None))
        url = normalize_url(reveal_database(value, env, setting), setting)
        made = [Destination.from_mapping(name, given) for name, given in destinations.items()]
        return cls(url, made, routes, **table)

    def __repr__(self) -> str:
        return f"Settings({mask_url(self.database)!r}, {list(self.destinations)!r}, {list(self.routes)!r})"


def needs_postgresql(destination: Destination, seen: str) -> ConfigError:
    """Return the error for a debezium destination on another database."""
    setting = f"destination {destination.name!r}: sink = {destination.sink!r}"
    return ConfigError(f"{setting} needs PostgreSQL, whose log Debezium reads; the database is {seen}")


def _check_exists(setting: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{setting} = {name!r}: no destination has this name{did_you_mean(name, known)}")


def _check_dead_letter(
    name: str, dead_letter: str, following: Mapping[str, str | None], handed_over: Collection[str]
) -> None:
    """Raise if the dead letter cannot take failed events; ``following`` maps destinations to dead letters."""
    setting = f"destination {name!r}: dead_letter"
    if dead_letter == name:
        raise wrong(setting, name, "name another destination, not itself")
    _check_exists(setting, dead_letter, following)
    if dead_letter in handed_over:
        raise wrong(setting, dead_letter, "Debezium takes only what is emitted to it")
    seen, step = {name}, following.get(name)
    while step is not None:
        if step in seen:
            raise wrong(
                setting, dead_letter, "failed events would go round in a circle; remove one dead_letter of it"
            )
        seen.add(step)
        step = following.get(step)


def database_source(path: Path | None, env: Mapping[str, str], database: str | None = None) -> str | None:
    """Return the name of the source that sets the database for ``Settings.load``, or None."""
    setting, _ = _named_database(database, env, _read(path, env).get("database"))
    return setting or None


def _named_database(given: str | None, env: Mapping[str, str], in_file: Any) -> tuple[str, Any]:
    """Return the setting that decides which database is used (empty if none does), and its value."""
    sources = {
        "database": given,
        "RELAYBOX_DATABASE": env.get("RELAYBOX_DATABASE"),
        "database in the file": in_file,
        "DATABASE_URL": env.get("DATABASE_URL"),
    }
    named = ((setting, value) for setting, value in sources.items() if value is not None and value != "")
    return next(named, ("", DEFAULT_DATABASE))


def find_file(path: Path | None, env: Mapping[str, str]) -> Path | None:
    """Return the file given, else RELAYBOX_CONFIG's, else a local ``relaybox.toml`` or ``pyproject.toml``."""
    if named := path or env.get("RELAYBOX_CONFIG"):
        return Path(named)
    own, shared = Path("relaybox.toml"), Path("pyproject.toml")
    if own.is_file():
        return own
    return shared if shared.is_file() and "relaybox" in _tools(shared) else None


def _tools(path: Path) -> dict[str, Any]:
    tools = read_toml(path).get("tool")
    return tools if isinstance(tools, dict) else {}


def read_routes(path: Path) -> tuple[Route, ...]:
    """Read a file's routes; raise ``ConfigError``."""
    return _routes(_table(path).get("routes", []))


def _routes(given: object) -> tuple[Route, ...]:
    if not isinstance(given, list):
        raise wrong("routes", given, "write each route as a [[routes]] table")
    return tuple(Route.from_mapping(each) for each in given)


def _read(path: Path | None, env: Mapping[str, str]) -> dict[str, Any]:
    return _table(found) if (found := find_file(path, env)) else {}


def _table(path: Path) -> dict[str, Any]:
    tables = {"destinations", "routes", "web"}
    known = {item.name for item in fields(Settings)}
    if path.name == "pyproject.toml":
        given = _tools(path).get("relaybox")
        if given is None:
            raise ConfigError(f"{path} has no [tool.relaybox] table; add one, or write relaybox.toml")
        return known_only(given, known, "[tool.relaybox]")
    misplaced = dict.fromkeys(known - tables, "write it under [relaybox]")
    table = known_only(read_toml(path), tables | {"relaybox"}, str(path), misplaced)
    return {**known_only(table.pop("relaybox", {}), known - tables, "[relaybox]"), **table}
