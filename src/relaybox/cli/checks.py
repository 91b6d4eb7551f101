"""The checks of what a relay needs: of ``config check``, and before a relay starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from relaybox.cli.application import check_tables
from relaybox.cli.options import Options
from relaybox.core.commands import command
from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Destination, Settings
from relaybox.core.values import mask_url
from relaybox.database.connect import in_memory
from relaybox.database.debezium import find, missing
from relaybox.database.migrations import current_version
from relaybox.errors import ConfigError, MissingExtra, StoreError
from relaybox.outbox import Outbox
from relaybox.sinks.open import Handlers, open_sink


class Check(NamedTuple):
    """One check; ``run`` returns what was found, or raises a ``RelayboxError``."""

    what: str
    run: Callable[[], str]


def checks(outbox: Outbox, given: Options, *, web: bool = True) -> Iterator[Check]:
    """Yield the checks of each destination with its secrets and packages, of the web and of the database."""
    if not outbox.settings.destinations:
        yield Check("destinations", lambda: _no_destinations(given))
    for destination in outbox.settings.destinations:
        yield Check(destination.name, lambda it=destination: _destination(it, outbox))  # type: ignore[misc]
    if web and outbox.settings.web:
        yield Check("web", lambda: _web(outbox.settings))
    yield Check("database", lambda: _database(outbox, given))


def check_all(given: Options) -> Outbox:
    """Return the outbox of the options; raise on the first thing that a relay cannot work with."""
    outbox = given.outbox()
    # A relay needs none of the web's secrets, and should not be given them.
    for one in checks(outbox, given, web=False):
        one.run()
    return outbox


def sink_name(destination: Destination, outbox: Outbox) -> str:
    """Return the destination's sink as it may be shown: without credentials, a function by its name."""
    function = outbox.handlers.get(destination.name)
    if function is None:
        return mask_url(destination.sink)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"handler:{getattr(function, '__module__', '?')}:{name}"


def _no_destinations(given: Options) -> str:
    raise ConfigError(given.no_destinations)


def _destination(destination: Destination, outbox: Outbox) -> str:
    check_secrets(destination)
    if destination.handed_over:
        unread = _unread(find(outbox.settings, destination.name), outbox.settings)
    else:
        check_sink(destination, outbox.handlers)
        unread = ""
    check_address(destination)
    routed = any(destination.name in route.to for route in outbox.settings.routes)
    return sink_name(destination, outbox) + ("" if routed else " (no route leads to it)") + unread


def _unread(destination: Destination, settings: Settings) -> str:
    """Describe what Debezium lacks; a relay can send to the other destinations without it."""
    try:
        lacking = missing(settings, destination)
    except StoreError:
        # The check of the database itself reports it.
        return ""
    fix = command(f"debezium {shlex.quote(destination.name)} --sql")
    return f" (the server has no {' and no '.join(lacking)} for it; run {fix})" if lacking else ""


def check_secrets(destination: Destination) -> None:
    """Raise if a secret is missing in this process."""
    for setting in ("secret", "auth"):
        secret = getattr(destination, setting)
        try:
            if secret is not None:
                secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"destination {destination.name!r}: {setting}: {error}") from None


def check_sink(destination: Destination, handlers: Handlers) -> None:
    """Raise if the sink, or a package that it needs, is not available."""
    try:
        open_sink(destination, handlers)
    except MissingExtra as error:
        raise ConfigError(f"destination {destination.name!r}: {error}") from None


def check_address(destination: Destination) -> None:
    """Refuse an address that nothing would ever be sent to. A name is not resolved: its answers change."""
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
    from relaybox.web.settings import WebSettings

    web = WebSettings.of(settings.web)
    web.reveal()
    users = ", ".join(f"{user.name} ({user.role})" for user in web.users)
    return f"{web.address}, {users or 'no users: only from this host'}"


def _database(outbox: Outbox, given: Options) -> str:
    settings = outbox.settings
    shown = mask_url(settings.database)
    if in_memory(settings.database):
        fix = "it is in memory, where no other process sees it; name a file, as in sqlite:///relaybox.db"
        raise ConfigError(f"database = {shown!r}: {fix}")
    check_tables(settings, given)
    version = current_version(settings.database, schema=settings.schema, prefix=settings.prefix)
    return f"{shown}, tables at version {version}"
