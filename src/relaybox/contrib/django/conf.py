"""Read the ``OUTBOX`` settings, and combine them with the handlers into the core's settings.

Two destinations exist by default: ``celery`` for Celery tasks and ``tasks`` for Django tasks. To change their
options, add ``"celery": {"sink": "celery:", …}`` or ``"tasks": {"sink": "handler:", …}`` to ``DESTINATIONS``.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias

from django.conf import settings
from django.utils.module_loading import import_string

from relaybox.contrib.django.handlers import Handler, by_path, registered
from relaybox.contrib.django.private import in_tests
from relaybox.core.redact import parse_rules
from relaybox.core.rollout import Which, changed, is_sent
from relaybox.core.settings import Backoff, Destination, Route, Settings
from relaybox.core.values import (
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
from relaybox.emit.row import RowBuilder
from relaybox.errors import ConfigError

Dispatch: TypeAlias = Literal["auto", "celery", "relay", "none"]
Names: TypeAlias = str | Iterable[str]
Routes: TypeAlias = Mapping[str, Names] | Iterable[Mapping[str, Any]]

CELERY = "celery"
"""The destination of ``delay_via_outbox``."""

TASKS = "tasks"
"""The destination of ``task_backend.OutboxBackend``."""

CONNECTIONS = 4
"""Connections to the broker for each delivering process; publishing is quick, so a few are enough."""


def _table(value: Mapping[str, Any] | None, setting: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(setting, value, "write a dict")
    return dict(value)


def _routes(value: Routes, setting: str) -> tuple[Route, ...]:
    """Return the routes of ``{"file.*": ["runner"]}``, or of a list of ``{"events": …, "to": …}``."""
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


def _hours(value: float, setting: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1_000_000:
        raise wrong(setting, value, "write a number of hours, 0 or more")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class OutboxSettings:
    """The keys of ``OUTBOX``; ``docs/reference/django.md`` explains each."""

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
    RETENTION_HOURS: Setting[float, float] = Setting(_hours, 168.0)
    MAX_ATTEMPTS: Setting[int, int] = Setting(parse_count, 5)
    BACKOFF: Setting[Mapping[str, Any] | None, dict[str, Any]] = Setting(_table, None)
    MAX_PAYLOAD: Setting[str | int, int] = Setting(parse_size, 1_048_576)
    NOTIFY: Setting[bool, bool] = Setting(parse_flag, True)
    INBOX_WINDOW: Setting[Duration, float] = Setting(duration_from(1), 604_800.0)
    IDEMPOTENCY_WINDOW: Setting[Duration, float] = Setting(duration_from(1), 2_592_000.0)
    REDACT: Setting[Iterable[str], tuple[str, ...]] = Setting(parse_rules, ())

    _where = "OUTBOX: "

    def __post_init__(self) -> None:
        self.backoff  # noqa: B018
        self.destinations  # noqa: B018

    @functools.cached_property
    def backoff(self) -> Backoff:
        """Return the backoff. It starts at a minute because the sweep does not run more often by default."""
        return Backoff.from_mapping({"base": 60.0, **self.BACKOFF})

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the default options of a destination."""
        return {
            "max_attempts": self.MAX_ATTEMPTS,
            "backoff": self.backoff,
            "retention": self.RETENTION_HOURS * 3600,
        }

    @functools.cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """Return the destinations in ``DESTINATIONS``."""
        fix = "write a dict such as {'sink': 'https://example.org/events'}"
        for name, given in self.DESTINATIONS.items():
            if not isinstance(given, Mapping):
                raise wrong(f"OUTBOX: DESTINATIONS[{name!r}]", given, fix)
        return tuple(
            Destination.from_mapping(name, {**self.defaults, **given})
            for name, given in self.DESTINATIONS.items()
        )

    @property
    def by_celery(self) -> bool:
        """True if Celery workers deliver."""
        return self.DISPATCH == "celery" or (self.DISPATCH == "auto" and has_celery())

    @property
    def rings(self) -> bool:
        """True if a commit notifies relays; in tests, its connection would prevent dropping the database."""
        return self.DISPATCH == "relay" or not in_tests()


def has_celery() -> bool:
    """True if the project has a Celery application, not only the default one that Celery creates."""
    if find_spec("celery") is None:
        return False
    from celery import current_app

    return bool(current_app.main != "default" or current_app.conf.task_always_eager)


def deliverer() -> str | None:
    """Describe what delivers without a relay; return None if Celery does not deliver."""
    settings = get_settings()
    if not settings.by_celery:
        return None
    return f"a Celery worker, at the latest in the next sweep (every {settings.SWEEP_INTERVAL:g} s)"


KEYS = tuple(field.name for field in fields(OutboxSettings))


@functools.cache
def get_settings() -> OutboxSettings:
    """Return the current settings, cached until ``forget``. Raise ``ConfigError``."""
    return parse(getattr(settings, "OUTBOX", {}))


def parse(given: Any) -> OutboxSettings:
    """Return the settings in an ``OUTBOX`` dict. Raise ``ConfigError``."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"OUTBOX is a {type(given).__name__}; write a dict of settings")
    upper = {str(key).upper(): f"write it in capitals: {str(key).upper()!r}" for key in given}
    fixes = {key: upper[str(key).upper()] for key in given if key not in KEYS and str(key).upper() in KEYS}
    return OutboxSettings(**known_only(given, KEYS, "OUTBOX", fixes))


class Configuration(NamedTuple):
    """The core's settings without the database, and the handlers by destination."""

    settings: Settings
    handlers: dict[str, Callable[..., Any]]
    builder: RowBuilder


def get_configuration() -> Configuration:
    """Return the current configuration. Raise ``ConfigError``."""
    return _make(_version)


# Cached by version, so that a thread still reading old settings cannot overwrite the current ones.
@functools.lru_cache(1)
def _make(_: int) -> Configuration:
    given = get_settings()
    handlers = [*registered.values(), *by_path(given.HANDLERS)]
    unwritten = list(implicit(given.destinations, [handler.name for handler in handlers]))
    every = [*handlers, *unwritten]
    written = {destination.name for destination in given.destinations}
    new = [*handlers, *(one for one in unwritten if one.name not in written)]
    destinations = [Destination(one.name, one.sink, **{**given.defaults, **one.options}) for one in new]
    routes = [*given.ROUTES, *(Route(one.events, one.name) for one in every)]
    core = Settings(
        destinations=[*given.destinations, *destinations],
        routes=[_changed.get((route.events, route.to), route) for route in routes],
        unrouted=given.UNROUTED,
        notify=given.NOTIFY,
        max_payload=given.MAX_PAYLOAD,
        inbox_window=given.INBOX_WINDOW,
        idempotency_window=given.IDEMPOTENCY_WINDOW,
        web={"redact": given.REDACT} if given.REDACT else {},
    )
    functions = {one.name: one.function for one in every if one.function is not None}
    return Configuration(core, functions, RowBuilder(core))


_changed: dict[tuple[tuple[str, ...], tuple[str, ...]], Route] = {}
"""The routes changed in this process, by events and destinations."""
_changing = threading.Lock()
_versions = itertools.count()
_version = next(_versions)


def enabled(route: Route | str, aggregate_id: Any) -> bool:
    """True if the route sends the events of this aggregate; see ``Outbox.enabled``."""
    return is_sent(get_configuration().builder.routes, route, aggregate_id)


def rollout(route: Route | str, percent: float) -> None:
    """Send the events of this percentage of the aggregates, from now on and in this process."""
    _change(route, rollout=percent)


def shadow(route: Route | str, on: bool) -> None:
    """Turn shadow mode on (store the route's events without sending) or off, in this process."""
    _change(route, shadow=on)


def _change(which: Which, **values: Any) -> None:
    with _changing:
        core = changed(get_configuration().settings, which, **values)
        _changed.update({(route.events, route.to): route for route in core.routes})
        _renew()


def forget(setting: str = "", **_: Any) -> None:
    """Read settings and handlers again at the next use. If ``OUTBOX`` changed, drop changes of routes."""
    if setting == "OUTBOX":
        _changed.clear()
    get_settings.cache_clear()
    _renew()


def _renew() -> None:
    global _version
    _version = next(_versions)


def implicit(written: Sequence[Destination], handlers: Sequence[str]) -> Iterator[Handler]:
    """Yield the default destinations that the project needs. Raise ``ConfigError`` if ``tasks`` is taken."""
    sinks = {destination.name: destination.sink for destination in written}
    if (
        find_spec("celery") is not None
        and sinks.get(CELERY, "celery:") == "celery:"
        and CELERY not in handlers
    ):
        yield Handler(None, ("celery.task",), CELERY, {"concurrency": CONNECTIONS}, "celery:")
    if _has_backend():
        if TASKS in handlers or sinks.get(TASKS, "handler:") != "handler:":
            raise ConfigError(
                f"OUTBOX: the destination {TASKS!r} is that of the task backend in TASKS; rename yours"
            )
        from relaybox.contrib.django.task_backend import run

        yield Handler(run, ("django.task",), TASKS, {})


def _has_backend() -> bool:
    given = getattr(settings, "TASKS", None)
    backends = given.values() if isinstance(given, Mapping) else ()
    for path in [backend.get("BACKEND") for backend in backends if isinstance(backend, Mapping)]:
        # Django reports a backend that cannot be imported.
        with suppress(ImportError):
            found = import_string(str(path))
            from relaybox.contrib.django.task_backend import OutboxBackend

            if isinstance(found, type) and issubclass(found, OutboxBackend):
                return True
    return False
