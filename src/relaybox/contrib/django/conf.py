"""The ``OUTBOX`` settings, typed and checked: one mistake is one error that names the key and the fix."""

# A Setting is a descriptor, which belongs to the class: one for all instances is what is meant.
# ruff: noqa: RUF009

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from django.conf import settings

from relaybox.config import Backoff, Destination, Route
from relaybox.errors import ConfigError
from relaybox.setting import (
    Duration,
    Setting,
    choice,
    duration_from,
    known_only,
    optional,
    parse_count,
    parse_flag,
    parse_name,
    parse_names,
    parse_size,
    wrong,
)

Dispatch: TypeAlias = Literal["auto", "celery", "relay", "none"]
Names: TypeAlias = str | Iterable[str]
Routes: TypeAlias = Mapping[str, Names] | Iterable[Mapping[str, Any]]


def _table(value: Mapping[str, Any] | None, setting: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(setting, value, "write a dict")
    return dict(value)


def _routes(value: Routes, setting: str) -> tuple[Route, ...]:
    """``{"file.*": ["runner"]}``, or a list of ``{"events": …, "to": …}``."""
    if isinstance(value, Mapping):
        return tuple(Route(events, to) for events, to in value.items())
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong(setting, value, "write a dict such as {'file.*': ['runner']}")
    return tuple(Route.from_mapping(given) for given in value)


def _handlers(value: Mapping[str, Names] | None, setting: str) -> dict[str, tuple[str, ...]]:
    return {
        events: parse_names(paths, f"{setting}[{events!r}]")
        for events, paths in _table(value, setting).items()
    }


@dataclass(frozen=True, kw_only=True)
class OutboxSettings:
    """What ``OUTBOX`` may hold.

    - ``DESTINATIONS``: name → the options of a ``relaybox.Destination``. ``ROUTES``: event types → names.
    - ``HANDLERS``: event types → dotted paths of functions.
    - ``DATABASES``: the aliases that hold an outbox, which sweeps and clean-ups go through.
    - ``REQUIRE_ATOMIC``: whether ``emit_event`` raises outside ``atomic()``.
    - ``DISPATCH``: who is told of a commit: ``celery``, a running ``relay``, ``none``; ``auto`` is Celery
      where the project has a Celery application, else a relay, and in tests nobody.
    - ``QUEUE``: the Celery queue of the delivery task.
    - ``SWEEP_INTERVAL``: how often beat looks for what is due. ``DRAIN_SECONDS``: how long one task delivers.
      ``EAGER_SECONDS``: how long an eager task may hold up the request.
    - ``RETENTION_HOURS``, ``MAX_ATTEMPTS``, ``BACKOFF``: for destinations that do not say otherwise.
    - ``UNROUTED``, ``MAX_PAYLOAD``, ``NOTIFY``, ``INBOX_WINDOW``, ``IDEMPOTENCY_WINDOW``: as in
      ``relaybox.toml``.
    """

    DESTINATIONS: Setting[Mapping[str, Any] | None, dict[str, Any]] = Setting(_table, None)
    ROUTES: Setting[Routes, tuple[Route, ...]] = Setting(_routes, ())
    HANDLERS: Setting[Mapping[str, Names] | None, dict[str, tuple[str, ...]]] = Setting(_handlers, None)
    DATABASES: Setting[Names, tuple[str, ...]] = Setting(parse_names, ("default",))
    REQUIRE_ATOMIC: Setting[bool, bool] = Setting(parse_flag, True)
    UNROUTED: Setting[str, Literal["raise", "store"]] = Setting(choice(Literal["raise", "store"]), "raise")
    DISPATCH: Setting[str, Dispatch] = Setting(choice(Dispatch), "auto")
    QUEUE: Setting[str | None, str | None] = Setting(optional(parse_name), None)
    SWEEP_INTERVAL: Setting[Duration, float] = Setting(duration_from(1), 60.0)
    DRAIN_SECONDS: Setting[Duration, float] = Setting(duration_from(1), 30.0)
    EAGER_SECONDS: Setting[Duration, float] = Setting(duration_from(0.1), 5.0)
    RETENTION_HOURS: Setting[float, float] = Setting(lambda value, setting: _hours(value, setting), 168.0)
    MAX_ATTEMPTS: Setting[int, int] = Setting(parse_count, 5)
    BACKOFF: Setting[Mapping[str, Any] | None, dict[str, Any]] = Setting(_table, None)
    MAX_PAYLOAD: Setting[str | int, int] = Setting(parse_size, 1_048_576)
    NOTIFY: Setting[bool, bool] = Setting(parse_flag, True)
    INBOX_WINDOW: Setting[Duration, float] = Setting(duration_from(1), 604_800.0)
    IDEMPOTENCY_WINDOW: Setting[Duration, float] = Setting(duration_from(1), 2_592_000.0)

    _where = "OUTBOX: "

    def __post_init__(self) -> None:
        self.backoff  # noqa: B018
        self.destinations  # noqa: B018

    @functools.cached_property
    def backoff(self) -> Backoff:
        """The first wait is a minute: the sweep does not come sooner."""
        return Backoff.from_mapping({"base": 60.0, **self.BACKOFF})

    @property
    def defaults(self) -> dict[str, Any]:
        """The options of a destination that does not say otherwise."""
        return {
            "max_attempts": self.MAX_ATTEMPTS,
            "backoff": self.backoff,
            "retention": self.RETENTION_HOURS * 3600,
        }

    @functools.cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """Those of ``DESTINATIONS``."""
        return tuple(
            Destination.from_mapping(name, self._with_defaults(name, given))
            for name, given in self.DESTINATIONS.items()
        )

    def _with_defaults(self, name: str, given: object) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            fix = "write a dict such as {'sink': 'https://example.org/events'}"
            raise wrong(f"OUTBOX: DESTINATIONS[{name!r}]", given, fix)
        return {**self.defaults, **given}


def _hours(value: float, setting: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1_000_000:
        raise wrong(setting, value, "write a number of hours, 0 or more")
    return float(value)


KEYS = tuple(field.name for field in fields(OutboxSettings))


@functools.cache
def get_settings() -> OutboxSettings:
    """The settings as they are now; ``forget`` lets them be read again. Raises ``ConfigError``."""
    return parse(getattr(settings, "OUTBOX", {}))


def parse(given: Any) -> OutboxSettings:
    """What is in a dict ``OUTBOX``. Raises ``ConfigError``."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"OUTBOX is a {type(given).__name__}; write a dict of settings")
    upper = {str(key).upper(): f"write it in capitals: {str(key).upper()!r}" for key in given}
    fixes = {key: upper[str(key).upper()] for key in given if key not in KEYS and str(key).upper() in KEYS}
    return OutboxSettings(**known_only(given, KEYS, "OUTBOX", fixes))
