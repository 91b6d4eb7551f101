"""Find the outbox that a command works with, and check it."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

from relaybox.cli.options import Options
from relaybox.core.commands import command
from relaybox.core.imports import error_with_line, load
from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Destination, Settings
from relaybox.core.values import mask_url, reveal_database
from relaybox.database import debezium
from relaybox.database.connect import in_memory
from relaybox.database.migrations import check, current_version
from relaybox.errors import ConfigError, MissingExtra, SchemaError, StoreError
from relaybox.outbox import Outbox
from relaybox.sinks.open import Handlers, open_sink
from relaybox.web.settings import WebSettings

FIX = "write where the application's Outbox is, such as --app shop.outbox:outbox"


def load_outbox(given: Options) -> Outbox:
    """Return the outbox that ``--app`` or ``app`` in the file names, or one made from the settings."""
    # Import from the working directory, but last: a file there must not replace a package that we import.
    # Settings outside the application may also name its functions, as handler:module:function.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    path = given.app
    if path is None and (path := (settings := given.read()).app) is None:
        outbox = Outbox(**{field.name: getattr(settings, field.name) for field in fields(Settings)})
        if (file := given.file()) is not None:
            outbox.follow(file)
        return outbox
    outbox = _application(path, given)
    if given.database is not None:
        outbox.settings = replace(outbox.settings, database=reveal_database(given.database, os.environ))
    return outbox


def open_outbox(given: Options) -> Outbox:
    """Return the outbox; raise if its tables are missing or too old."""
    outbox = given.outbox()
    check_tables(outbox.settings, given)
    return outbox


def check_tables(settings: Settings, given: Options) -> None:
    """Raise if the database is unreachable, or its tables are missing or too old."""
    try:
        check(settings.database, schema=settings.schema, prefix=settings.prefix)
    except SchemaError as error:
        raise SchemaError(f"{given.shown_database(settings)}: {error}") from None
    except StoreError as error:
        raise StoreError(f"{error}; {given.no_server}") from error


def _application(path: str, given: Options) -> Outbox:
    with _flags_in_environment(given):
        found = load(path, f"app = {path!r}", FIX)
        if not isinstance(found, Outbox) and callable(found):
            found = _called(found, path)
    if not isinstance(found, Outbox):
        raise ConfigError(f"app = {path!r}: it is not an Outbox but of type {type(found).__name__}; {FIX}")
    return found


def _called(factory: Any, path: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError:
        needs = "it is not an Outbox but a function that needs arguments"
        raise ConfigError(f"app = {path!r}: {needs}; {FIX}") from None
    except ValueError:
        # Some callables written in C have no signature.
        pass
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"app = {path!r}: the call failed: {error_with_line(error)}") from error


@contextmanager
def _flags_in_environment(given: Options) -> Iterator[None]:
    """Put the flags into the environment, where the application's ``Outbox()`` reads them on import."""
    flags = {"RELAYBOX_DATABASE": given.database, "RELAYBOX_CONFIG": given.config}
    before = dict(os.environ)
    os.environ.update({name: flag for name, flag in flags.items() if flag is not None})
    try:
        yield
    finally:
        for name in flags:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


Check: TypeAlias = tuple[str, Callable[[], str]]
"""What is checked, and a function that describes it, or raises a ``RelayboxError``."""


def checks(outbox: Outbox, given: Options, *, web: bool = True) -> Iterator[Check]:
    """Yield the checks of each destination (secrets, packages, address), the web and the database."""
    if not outbox.settings.destinations:
        yield "destinations", partial(_no_destinations, given)
    for destination in outbox.settings.destinations:
        yield destination.name, partial(_destination, destination, outbox)
    if web and outbox.settings.web:
        yield "web", partial(_web, outbox.settings)
    yield "database", partial(_database, outbox.settings, given)


def check_all(given: Options) -> Outbox:
    """Return the outbox; raise if a check of something that a relay needs fails."""
    outbox = given.outbox()
    # A relay does not need the secrets of the web, and should not have them.
    for _, check_one in checks(outbox, given, web=False):
        check_one()
    return outbox


def sink_name(destination: Destination, outbox: Outbox) -> str:
    """Return the destination's sink without credentials; a function is shown by its name."""
    function = outbox.handlers.get(destination.name)
    if function is None:
        return mask_url(destination.sink)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"handler:{getattr(function, '__module__', '?')}:{name}"


def _no_destinations(given: Options) -> str:
    raise ConfigError(given.no_destinations)


def _destination(destination: Destination, outbox: Outbox) -> str:
    destination.check_secrets()
    unread = ""
    if destination.handed_over:
        unread = _unread(debezium.find(outbox.settings, destination.name), outbox.settings)
    else:
        check_sink(destination, outbox.handlers)
    check_address(destination)
    routed = any(destination.name in route.to for route in outbox.settings.routes)
    return sink_name(destination, outbox) + ("" if routed else " (no route leads to it)") + unread


def _unread(destination: Destination, settings: Settings) -> str:
    """Describe what Debezium lacks. This is not an error: a relay can still send to other destinations."""
    try:
        lacking = debezium.missing(settings, destination)
    except StoreError:
        # The check of the database reports this error.
        return ""
    fix = command(f"debezium {shlex.quote(destination.name)} --sql")
    return f" (the server has no {' and no '.join(lacking)} for it; run {fix})" if lacking else ""


def check_sink(destination: Destination, handlers: Handlers) -> None:
    """Raise if the sink cannot be opened, for example because a package is missing."""
    try:
        open_sink(destination, handlers)
    except MissingExtra as error:
        raise ConfigError(f"destination {destination.name!r}: {error}") from None


def check_address(destination: Destination) -> None:
    """Raise if the sink never sends to this address. Names are not resolved: their addresses change."""
    if destination.scheme not in ("http", "https"):
        return
    from relaybox.sinks.http.address import Guard
    from relaybox.sinks.http.sink import parse_url

    try:
        Guard(destination.name, destination.allow).check_host(parse_url(destination).raw_host or "")
    except Unavailable as error:
        sink = mask_url(destination.sink)
        raise ConfigError(f"destination {destination.name!r}: sink = {sink!r}: {error}") from None


def _web(settings: Settings) -> str:
    web = WebSettings.of(settings.web)
    web.reveal()
    users = ", ".join(f"{user.name} ({user.role})" for user in web.users)
    return f"{web.address}, {users or 'no users: it prints a login link'}"


def _database(settings: Settings, given: Options) -> str:
    shown = mask_url(settings.database)
    if in_memory(settings.database):
        fix = "it is in memory, where no other process sees it; name a file, as in sqlite:///relaybox.db"
        raise ConfigError(f"database = {shown!r}: {fix}")
    check_tables(settings, given)
    version = current_version(settings.database, schema=settings.schema, prefix=settings.prefix)
    return f"{shown}, tables at version {version}"
