"""One setting: how a value is written, checked when it enters, and kept. Secrets appear in no message."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args, overload
from urllib.parse import unquote, unquote_plus

from relaybox.core.scrub import conceal
from relaybox.errors import ConfigError, UnknownSetting, shorten

Duration: TypeAlias = str | int | float | timedelta
"""Seconds, a timedelta, or text such as ``50ms``, ``2s``, ``5m``, ``1h``, ``7d``."""

Given = TypeVar("Given")
Kept = TypeVar("Kept")
Parse: TypeAlias = Callable[[Any, str], Kept]
"""Converts a given value to the stored one; the text is the setting's name, for messages."""

LONGEST_DURATION = 36_500 * 86_400.0
"""Seconds; every database can add them to its clock, and subtract them."""

MOST = 2**31 - 1
"""The greatest count that every database can store in a column."""

_DATABASES = ("postgresql", "postgres", "mysql", "mariadb", "sqlite")
_ALIASES = {"postgres": "postgresql", "mariadb": "mysql"}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)/([smh])")
_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB)")


class Setting(Generic[Given, Kept]):
    """A dataclass field that stores what ``parse`` returns. ``_where`` of the dataclass prefixes messages."""

    def __init__(self, parse: Parse[Kept], default: Given) -> None:
        self._parse = parse
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Given: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Kept: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self._default if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Given) -> None:
        setting = f"{instance._where}{self._name}"
        try:
            instance.__dict__[self._name] = self._parse(value, setting)
        except ConfigError:
            raise
        except Exception as error:
            # The caller's object may fail at anything. Do not show it: it may be a secret.
            seen = f"of type {type(value).__name__}, which fails with {type(error).__name__}"
            raise ConfigError(f"{setting} is {seen}; write a plain value") from error


class Table(Mapping[str, Any]):
    """An immutable mapping. Its repr shows only the names, because a value may be secret."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values))

    def __repr__(self) -> str:
        return f"Table({', '.join(self._values)})"


UNTIL = "until:"
"""Begins the expiry date of the secret before it, where a setting holds several."""


class Secret:
    """A value, ``env:NAME`` or ``file:PATH``, read only when used and never shown.

    Not a dataclass: ``dataclasses.asdict`` of its owner would reveal it.
    """

    __slots__ = ("_source",)

    def __init__(self, source: str) -> None:
        self._source = source

    def reveal(self, env: Mapping[str, str] | None = None) -> str:
        """Return the secret; raise ``ConfigError`` if the variable or file is missing or empty."""
        kind, _, name = self._source.partition(":")
        if kind == "env":
            value, fix = (os.environ if env is None else env).get(name, ""), f"set the variable {name}"
        elif kind == "file":
            value, fix = _read_secret(Path(name)), f"write the secret into {name}"
        else:
            value, fix = self._source, ""
        if not value:
            raise ConfigError(f"{self._source} is missing or empty; {fix}")
        if "://" not in value:
            conceal(value)
        return value

    def reveal_for(self, setting: str, env: Mapping[str, str] | None = None) -> str:
        """Return the secret of a setting, which errors name."""
        try:
            return self.reveal(env)
        except ConfigError as error:
            raise ConfigError(f"{setting}: {error}") from None

    def inline(self, env: Mapping[str, str]) -> bool:
        """True if the settings hold the secret itself, and the caller did not read it from ``env``."""
        return not is_reference(self._source) and self._source not in env.values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._source == other._source

    def __hash__(self) -> int:
        return hash(self._source)

    def __repr__(self) -> str:
        shown = self._source if is_reference(self._source) else "…"
        return f"Secret({shown})"

    __str__ = __repr__


def _read_secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeError) as error:
        # Not chained: a decoding error carries the file's bytes.
        raise ConfigError(f"file:{path} cannot be read as text ({type(error).__name__})") from None


def wrong(setting: str, value: object, fix: str) -> ConfigError:
    """Return the error for a value that a setting does not take."""
    return ConfigError(f"{setting} = {shorten(value)}: {fix}")


def known_only(
    mapping: object, known: Iterable[str], where: str, fixes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Copy a mapping, and raise if a name is unknown. ``fixes`` has advice for common wrong names."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is a {type(mapping).__name__}; write a table of settings")
    names = set(known)
    try:
        given = dict(mapping)
    except Exception as error:
        raise ConfigError(f"{where} cannot be read: {type(error).__name__}; write a plain table") from error
    for name in given:
        if name not in names:
            raise UnknownSetting(str(name), names, where, (fixes or {}).get(name))
    return given


def mask_url(url: str) -> str:
    """Return the URL for messages: without user, password and query; of HTTP without its path, too."""
    without_user = re.sub(r"(?<=//).*@", "***@", url, flags=re.DOTALL)
    without_query = re.sub(r"\?.*", "?***", without_user, flags=re.DOTALL)
    # The path of some webhooks is their secret.
    return re.sub(r"(?i)\A(https?://[^/?#]+[/#])[^?]+", r"\1***", without_query)


def is_reference(value: str) -> bool:
    """True if it says where a secret is, ``env:NAME`` or ``file:PATH``, and is not the secret itself."""
    return value.startswith(("env:", "file:"))


def normalize_url(url: str, setting: str = "database") -> str:
    """Return the database's URL as ``postgresql://``, ``mysql://`` or ``sqlite://``, without a driver."""
    match = re.fullmatch(r"(\w+)(?:\+\w+)?://(.*)", url, re.DOTALL) if isinstance(url, str) else None
    if match is None or (scheme := match[1].lower()) not in _DATABASES:
        raise _no_database(url, setting)
    dialect = _ALIASES.get(scheme, scheme)
    normal = f"{dialect}://{match[2]}"
    fix = _file_fix(normal, match[2]) if dialect == "sqlite" else _server_fix(match[2])
    if fix is not None:
        raise ConfigError(f"{setting} = {mask_url(normal)!r}: {fix}")
    return normal


def _no_database(url: object, setting: str) -> ConfigError:
    fix = f"write one of {', '.join(f'{name}://' for name in _DATABASES)} (with or without +driver)"
    if not isinstance(url, str):
        return ConfigError(f"{setting} is of type {type(url).__name__}: {fix}")
    if re.match(r"\w+(\+\w+)?://", url):
        return ConfigError(f"{setting} = {mask_url(url)!r}: {fix}")
    # Without a scheme any part may be a password; a plain file name has none.
    file = re.fullmatch(r"[\w./\\ -]+\.(db3?|sqlite3?)", url)
    return ConfigError(f"{setting} is not a URL: {fix}" + (f"; for a file: sqlite:///{url}" if file else ""))


def _file_fix(url: str, place: str) -> str | None:
    if not place or place[0] in "/?":
        return None
    return f"write {mask_url(url).replace('://', ':///', 1)} (three slashes; four for an absolute path)"


def _server_fix(place: str) -> str | None:
    before, _, query = place.partition("?")
    user, _, rest = before.rpartition("@")
    # Drivers repeat what they cannot parse, which would show a password.
    if re.search(r"\s|%(?![0-9A-Fa-f]{2})", user):
        return "its user or password holds a space or a lone %; write %20 for a space and %25 for a %"
    # If the password has a question mark, part of it would be read as the port, and shown.
    if "@" in query:
        return None
    # PostgreSQL accepts several hosts, each with its own port.
    for host in rest.partition("/")[0].split(","):
        port = re.fullmatch(r"(?:\[.*\]|[^:\[\]]*):(.+)", host, re.DOTALL)
        if port and not re.fullmatch(r"[0-9]+", port[1]):
            return f"the port {port[1]!r} is not a number"
    return None


def without_password(text: str, url: str) -> str:
    """Remove passwords from a driver's message: libpq repeats the parts of a URL that it cannot parse."""
    text = text.replace(url, mask_url(url))
    for secret in sorted(_passwords(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _passwords(url: str) -> set[str]:
    """Return the URL's passwords as written and decoded, and the parts that another parser may see."""
    rest = url.partition("//")[2]
    password = rest.rpartition("@")[0].partition(":")[2]
    given = [password, *re.split(r"[/?#@:\s]", password), *re.findall(r"password=([^&#]*)", rest)]
    decoded = [unquote(one) for one in given] + [unquote_plus(one) for one in given]
    # One or two characters are not a secret, and masking them would garble the message.
    return {one for one in (*given, *decoded) if len(one) > 2}


def parse_duration(value: Duration, setting: str) -> float:
    """Return seconds from ``50ms``, ``2s``, ``5m``, ``1h``, ``7d``, a number of seconds or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else _number(value)
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds < math.inf:
        raise wrong(setting, value, "write a duration such as '50ms', '2s', '5m', '1h' or '7d'")
    if seconds > LONGEST_DURATION:
        raise wrong(setting, value, "write no more than 36500d, which is a hundred years")
    return seconds


def parsed(kind: Callable[[str], Kept], text: str) -> Kept | None:
    """Return ``kind(text)``, or None if it raises ``ValueError``."""
    try:
        return kind(text)
    except ValueError:
        return None


def parse_moment(text: str, setting: str, direction: int) -> datetime:
    """Read a time, or a duration from now: into the past with -1, into the future with 1."""
    moment = parsed(datetime.fromisoformat, text)
    try:
        if moment is None:
            return datetime.now(UTC) + direction * timedelta(seconds=parse_duration(text, setting))
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ConfigError, OverflowError, ValueError):
        fix = "write a duration such as '30m', '1h' or '7d', or a time such as '2026-01-31T12:00:00Z'"
        raise ConfigError(f"{setting} = {text!r}: {fix}") from None


def show_duration(seconds: float) -> str:
    """Return seconds as they are written in a file: ``7d``."""
    for unit, size in sorted(_SECONDS.items(), key=lambda one: -one[1]):
        if size >= 1 and seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0s"


def duration_from(least: float) -> Parse[float]:
    """Return a parser of durations of at least ``least`` seconds."""

    def parse(value: Duration, setting: str) -> float:
        seconds = parse_duration(value, setting)
        if seconds < least:
            raise wrong(setting, value, f"it must be {least:g}s or longer")
        return seconds

    return parse


def parse_rate(value: str | float, setting: str) -> float:
    """Return events a second from ``100/s``, ``600/m``, ``10/h`` or a number."""
    rate = _number(value)
    if isinstance(value, str) and (match := _RATE.fullmatch(value.strip())):
        rate = float(match[1]) / _SECONDS[match[2]]
    if not 0 < rate < math.inf:
        raise wrong(setting, value, "write a rate above zero, such as '100/s', '600/m' or '10/h'")
    return rate


def parse_size(value: str | int, setting: str) -> int:
    """Return bytes from ``1MiB``, ``512KiB``, ``100B`` or a whole number."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        value = int(match[1]) * _BYTES[match[2]]
    if isinstance(value, str | bool) or not isinstance(value, int) or value < 1:
        raise wrong(setting, value, "write a size such as '1MiB', '512KiB' or a number of bytes")
    return value


def _number(value: object) -> float:
    """Return the value if it is a number, else NaN, which is in no range. A bool is not a number here."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.inf


def parse_factor(value: float, setting: str) -> float:
    """Return a finite number, 1 or more."""
    if not 1 <= _number(value) < math.inf:
        raise wrong(setting, value, "write a number, 1 or more")
    return float(value)


def parse_count(value: int, setting: str) -> int:
    """Return a whole number, 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(setting, value, "write a whole number, 1 or more")
    if value > MOST:
        raise wrong(setting, value, f"write no more than {MOST}")
    return int.__int__(value)


def parse_percent(value: float, setting: str) -> float:
    """Return a percentage from 0 to 100 with at most two decimal places."""
    percent = _number(value)
    if not 0 <= percent <= 100 or abs(percent * 100 - round(percent * 100)) > 1e-6:
        raise wrong(setting, value, "write a percentage, 0 to 100, such as 10, 2.5 or 0.25")
    return percent


def parse_flag(value: bool, setting: str) -> bool:
    """Return True or False. Text such as "no" would count as true, so it is refused."""
    if not isinstance(value, bool):
        raise wrong(setting, value, "write true or false")
    return value


def either(*words: str) -> str:
    """Join two or more alternatives: ``a, b or c``."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def choice(literal: Any, *, or_function: bool = False) -> Parse[Any]:
    """Return a parser that takes a Literal's values, and functions if allowed."""
    allowed = get_args(literal)
    fix = f"choose {either(*map(repr, allowed), *(['a function'] if or_function else []))}"

    def parse(value: Any, setting: str) -> Any:
        if value in allowed or (or_function and callable(value)):
            return value
        raise wrong(setting, value, fix)

    return parse


def optional(parse: Parse[Kept]) -> Parse[Kept | None]:
    """Return a parser that also takes None."""
    return lambda value, setting: None if value is None else parse(value, setting)


def parse_jitter(value: float | Literal["full"], setting: str) -> float | Literal["full"]:
    """Return a fraction of the delay from 0 to 1, or ``full``."""
    if value == "full":
        return "full"
    if not 0 <= _number(value) <= 1:
        raise wrong(setting, value, "write a number, 0 to 1, or 'full'")
    return float(value)


def parse_secret(value: str | Secret, setting: str) -> Secret:
    """Return a ``Secret`` made from a value, ``env:NAME`` or ``file:PATH``."""
    if isinstance(value, Secret):
        return value
    if isinstance(value, str) and value not in ("", "env:", "file:"):
        return Secret(value)
    seen = "empty" if isinstance(value, str) else f"of type {type(value).__name__}"
    # A caller who passes an engine as the database needs to read that a URL is expected.
    what = "a URL such as postgresql://user@host/db" if setting.startswith("database") else "a value"
    raise ConfigError(f"{setting} is {seen}; write {what}, env:NAME or file:PATH")


def key_lengths(secret: str) -> list[int]:
    """Return the number of bytes of each symmetric key in a secret that signs."""
    lengths = []
    for word in secret.split():
        prefix, _, encoded = word.partition("_")
        if prefix == "whsec":
            # Each character stands for six bits.
            lengths.append(len(encoded.rstrip("=")) * 6 // 8)
        elif prefix not in ("whsk", "whpk") and not word.startswith(UNTIL):
            lengths.append(len(word.encode("utf-8", "surrogatepass")))
    return lengths


def reveal_database(value: Any, env: Mapping[str, str], setting: str = "database") -> str:
    """Return the database's URL, read from ``env:NAME`` or ``file:PATH`` if given so."""
    return parse_secret(value, setting).reveal_for(setting, env)


def parse_name(value: str, setting: str) -> str:
    """Return a name of 1 to 100 characters that any database stores and any log prints."""
    if not isinstance(value, str) or not 1 <= len(value) <= 100:
        raise wrong(setting, value, "write a name of 1 to 100 characters")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise wrong(setting, value, "leave out control characters and lone surrogates")
    return value


def parse_names(value: str | Iterable[str], setting: str) -> tuple[str, ...]:
    """Return one name or several as a tuple; none may be empty."""
    if value == ():
        raise ConfigError(f"{setting} is missing; write a name or a list of names")
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise wrong(setting, value, "write a name or a list of names, none of them empty")
    return names


def parse_list(value: Iterable[str], setting: str, example: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple, which may be empty."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong(setting, value, f"write a list such as {example}")
    return tuple(value)


def parse_table(value: Mapping[str, Any], setting: str) -> Mapping[str, Any]:
    """Return a table of names and values."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise wrong(setting, value, "write a table such as { name = 'value' }")
    return Table(value)


def parse_networks(value: Iterable[str], setting: str) -> tuple[str, ...]:
    """Return networks such as ``10.0.0.0/8``."""
    if not isinstance(value, Iterable):
        raise wrong(setting, value, "write a list of networks such as ['10.0.0.0/8']")
    entries = (value,) if isinstance(value, str) else tuple(value)
    for entry in entries:
        try:
            ipaddress.ip_network(str(entry))
        except ValueError as error:
            raise wrong(setting, entry, f"write a network such as '10.0.0.0/8' ({error})") from None
    return tuple(map(str, entries))


def identifier(name: str, setting: str) -> str:
    """Return ``name`` if it can be used in SQL as a schema or as a table's prefix."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", name):
        return name
    raise wrong(setting, name, "use up to 40 letters, digits and underscores, no digit first")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; create it, or name another file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
