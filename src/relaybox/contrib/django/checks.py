"""System checks, one message for each mistake; ``docs/reference/django.md`` explains the ids."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import Error as DatabaseError
from django.db import connections

from relaybox.contrib.django import conf
from relaybox.contrib.django.beat import DELIVER
from relaybox.contrib.django.conf import KEYS, Configuration, OutboxSettings, get_settings, parse
from relaybox.contrib.django.databases import VENDORS, connection_of, dialect_of, unsupported
from relaybox.contrib.django.handlers import by_path, registered
from relaybox.contrib.django.tables import check_tables
from relaybox.core.exposure import exposures
from relaybox.core.settings import ConfigWarning, Destination, Settings
from relaybox.errors import ConfigError, SchemaError, StoreError

SECRET = "A process without it delivers nothing there, and `manage.py outbox relay` does not start."

UNROUTED = 1_000
"""The number of unrouted events from which the check collects event types."""

SEVERAL = {"DESTINATIONS": "relaybox.E003", "ROUTES": "relaybox.E004", "HANDLERS": "relaybox.E005"}
"""Settings with several entries, each of which is checked on its own."""


@register()  # type: ignore[untyped-decorator]
def check_settings(**_: Any) -> list[CheckMessage]:
    """Run the checks that need no database."""
    with warnings.catch_warnings(record=True, action="always") as noted:
        found = _settings()
    # A warning may repeat at every reading.
    texts = dict.fromkeys(str(one.message) for one in noted if issubclass(one.category, ConfigWarning))
    return [*found, *(Warning(text, id="relaybox.W004") for text in texts)]


def _settings() -> list[CheckMessage]:
    if errors := list(_mistakes(getattr(django_settings, "OUTBOX", {}))):
        # A mistake may be found twice. Messages compare but do not hash.
        return [error for index, error in enumerate(errors) if error not in errors[:index]]
    try:
        configuration = conf.get_configuration()
    except ConfigError as error:
        return [Error(str(error), id="relaybox.E003")]
    settings = get_settings()
    found = [*_databases(settings), *_celery(settings)]
    for destination in configuration.settings.destinations:
        found += _destination(destination, configuration)
    return found


def _mistakes(given: Any) -> Iterator[CheckMessage]:
    """Yield an error for each mistake in ``OUTBOX``; ``parse`` stops at the first."""
    if not isinstance(given, Mapping):
        yield from _tried("relaybox.E001", parse, given)
        return
    for key, value in given.items():
        if key not in KEYS:
            yield from _tried("relaybox.E001", parse, {key: value})
        elif key in SEVERAL and isinstance(value, Mapping):
            for name, one in value.items():
                yield from _tried(SEVERAL[key], parse, {key: {name: one}})
        else:
            yield from _tried(SEVERAL.get(key, "relaybox.E002"), parse, {key: value})
    yield from _unknown_functions(given.get("HANDLERS"))
    yield from _dead_ends(given)


def _tried(
    id_: str, function: Callable[..., Any], *given: Any, hint: str | None = None, **options: Any
) -> Iterator[CheckMessage]:
    """Yield a message with this id, an error or a warning, if the function raises ``ConfigError``."""
    try:
        function(*given, **options)
    except ConfigError as error:
        yield (Warning if ".W" in id_ else Error)(str(error), hint=hint, id=id_)


def _unknown_functions(given: Any) -> Iterator[CheckMessage]:
    for events, paths in given.items() if isinstance(given, Mapping) else ():
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list | tuple) else ():
            yield from _tried("relaybox.E005", _load, {events: path})


def _load(handlers: Mapping[str, str]) -> None:
    list(by_path(OutboxSettings(HANDLERS=handlers).HANDLERS))


def _dead_ends(given: Mapping[str, Any]) -> Iterator[CheckMessage]:
    """Yield an error for each route to a missing destination; a broken one is reported on its own."""
    destinations, handlers = given.get("DESTINATIONS"), given.get("HANDLERS")
    try:
        routes = parse({"ROUTES": given.get("ROUTES", ())}).ROUTES
        functions = parse({"HANDLERS": handlers}).HANDLERS.values()
    except ConfigError:
        return
    names = [*(destinations if isinstance(destinations, Mapping) else ()), *registered]
    names += [path for paths in functions for path in paths] + [one.name for one in conf.implicit((), ())]
    known = [Destination(name, "memory:") for name in dict.fromkeys(names) if isinstance(name, str) and name]
    for route in routes:
        yield from _tried("relaybox.E004", Settings, destinations=known, routes=[route])


@register(Tags.security, deploy=True)  # type: ignore[untyped-decorator]
def check_exposure(**_: Any) -> list[CheckMessage]:
    """Check what destinations expose, for ``check --deploy``."""
    try:
        destinations = conf.get_configuration().settings.destinations
    except ConfigError:
        # ``check_settings`` reports it.
        return []
    found = [one for destination in destinations for one in exposures(destination, os.environ)]
    return [Warning(f"{one.title}: {one.detail}", hint=f"{one.fix}.", id="relaybox.W011") for one in found]


@register(Tags.database)  # type: ignore[untyped-decorator]
def check_databases(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the databases: their versions, their tables and their unrouted events."""
    try:
        settings = get_settings()
    except ConfigError:
        # ``check_settings`` reports it.
        return []
    wanted = [one for one in settings.DATABASES if one in (databases or ()) and one in connections.settings]
    return [message for alias in wanted for message in _database(alias)]


def _databases(settings: OutboxSettings) -> Iterator[CheckMessage]:
    needs_relay = settings.DISPATCH != "none" and not settings.by_celery
    for alias in settings.DATABASES:
        try:
            connection = connection_of(alias)
        except ConfigError as error:
            text = str(error).replace(f"using = {alias!r}", f"OUTBOX: DATABASES = {alias!r}")
            yield Error(text, id="relaybox.E006")
            continue
        if connection.vendor not in VENDORS:
            yield Error(f"OUTBOX: DATABASES: {unsupported(connection)}", id="relaybox.E006")
        elif connection.vendor == "sqlite" and connection.is_in_memory_db() and needs_relay:
            hint = "Name a file in DATABASES, or set OUTBOX['DISPATCH'] = 'none'."
            text = f"database {alias!r} is in memory, where no relay sees its events"
            yield Warning(text, hint=hint, id="relaybox.W005")


def _celery(settings: OutboxSettings) -> Iterator[CheckMessage]:
    if settings.DISPATCH not in ("celery", "auto"):
        return
    if settings.DISPATCH == "celery" and find_spec("celery") is None:
        text = "OUTBOX: DISPATCH = 'celery': celery is not installed: pip install 'relaybox[celery]'"
        yield Error(text, id="relaybox.E007")
    elif conf.has_celery():
        from celery import current_app

        yield from _limits(settings, current_app.conf)
        yield from _schedule(current_app.conf)
    elif settings.DISPATCH == "celery":
        text = "OUTBOX: DISPATCH = 'celery': the project has no Celery application"
        hint = "Create one, and import it in the project's __init__.py, as Celery's documentation describes."
        yield Warning(text, hint=hint, id="relaybox.W006")


def _limits(settings: OutboxSettings, celery: Any) -> Iterator[CheckMessage]:
    """Warn of a limit that stops a task during delivery: its rows would wait until their leases expire."""
    from relaybox.contrib.django.drain import PATIENCE

    needed = settings.DRAIN_SECONDS + PATIENCE
    for name in ("task_time_limit", "task_soft_time_limit"):
        limit = celery[name]
        if limit is not None and limit <= needed:
            text = f"CELERY_{name.upper()} = {limit} ends the delivery task, which takes up to {needed:g} s"
            yield Warning(text, hint="Raise it, or lower OUTBOX['DRAIN_SECONDS'].", id="relaybox.W010")


def _schedule(celery: Any) -> Iterator[CheckMessage]:
    """Warn if the settings schedule no sweep; schedules in a database are not read."""
    schedule = celery.beat_schedule or {}
    in_database = "Database" in str(celery.beat_scheduler)
    if in_database or (not schedule and apps.is_installed("django_celery_beat")) or celery.task_always_eager:
        return
    if all(one.get("task") != DELIVER for one in schedule.values()):
        text = "the schedule of Celery's beat has no sweep: retries and events that were not dispatched stay"
        hint = "Add **relaybox.contrib.django.beat.beat_schedule(OUTBOX) to CELERY_BEAT_SCHEDULE."
        yield Warning(text, hint=hint, id="relaybox.W007")


def _destination(destination: Destination, configuration: Configuration) -> Iterator[CheckMessage]:
    from relaybox.cli.application import check_address, check_sink

    # Only the process that delivers needs the secret, so a missing one is not an error.
    secrets = _tried("relaybox.W001", destination.check_secrets, hint=SECRET)
    sink = _tried("relaybox.E008", check_sink, destination, configuration.handlers)
    if found := next(itertools.chain(secrets, sink), None):
        yield found
        return
    yield from _tried("relaybox.W002", check_address, destination)
    settings = configuration.settings
    reached = {name for route in settings.routes for name in route.to}
    if destination.name not in reached | {one.dead_letter for one in settings.destinations}:
        text = f"destination {destination.name!r}: no route leads to it"
        hint = "Only events that name it in emit_event(destinations=…) go there."
        yield Warning(text, hint=hint, id="relaybox.W003")


def _database(alias: str) -> Iterable[CheckMessage]:
    from relaybox.operate.doctor.database import NAMES, OLDEST

    connection = connections[alias]
    try:
        dialect = dialect_of(connection).name
        version = connection.get_database_version()
        if tuple(version) < OLDEST[dialect]:
            found, needed = (".".join(map(str, numbers)) for numbers in (version, OLDEST[dialect]))
            text = f"database {alias!r}: {NAMES[dialect]} {found} is too old for an outbox"
            return [Error(text, hint=f"It needs {NAMES[dialect]} {needed} or newer.", id="relaybox.E009")]
        if "django_migrations" not in connection.introspection.table_names():
            # The project has not run any migration yet.
            return []
        check_tables(alias)
        return _unrouted(alias)
    except (SchemaError, StoreError) as error:
        return [Warning(str(error), id="relaybox.W008")]
    except (ConfigError, DatabaseError):
        # ``check_settings`` or Django reports it.
        return []


def _unrouted(alias: str) -> list[CheckMessage]:
    from relaybox.contrib.django.models import OutboxEvent

    waiting = OutboxEvent.objects.using(alias).filter(status="pending", destination="")
    types = sorted(set(waiting.values_list("event_type", flat=True)[:UNROUTED]))
    if not types:
        return []
    text = f"database {alias!r}: events wait because no route matches them: {', '.join(map(repr, types))}"
    hint = "Add a route to OUTBOX['ROUTES'], or a handler; the next sweep sends them there."
    return [Warning(text, hint=hint, id="relaybox.W009")]
