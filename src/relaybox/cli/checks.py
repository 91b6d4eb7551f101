"""Everything that must be right before a relay starts, each thing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from relaybox.app import Outbox
from relaybox.config import Destination
from relaybox.connect import in_memory
from relaybox.errors import ConfigError, MissingExtra, SchemaError, StoreError
from relaybox.migrations import check, current_version
from relaybox.parts import open_sink
from relaybox.setting import mask_url

NO_DESTINATIONS = (
    "no destinations are configured: add a [destinations.NAME] table to relaybox.toml, or name the "
    "application with --app module:outbox; `relaybox init` writes an example"
)


class Check(NamedTuple):
    """One thing to look at; ``run`` says what was found, or raises a ``RelayboxError``."""

    what: str
    run: Callable[[], str]


def checks(outbox: Outbox) -> Iterator[Check]:
    """The destinations, each with its secrets and what it needs, and the database."""
    if not outbox.settings.destinations:
        yield Check("destinations", _no_destinations)
    for destination in outbox.settings.destinations:
        yield Check(destination.name, lambda it=destination: _destination(it, outbox))  # type: ignore[misc]
    yield Check("database", lambda: _database(outbox))


def check_all(outbox: Outbox) -> Outbox:
    """Raise the first thing that is wrong; else the outbox itself."""
    for one in checks(outbox):
        one.run()
    return outbox


def sink_name(destination: Destination, outbox: Outbox) -> str:
    """The destination's sink as it may be shown: without credentials, a function by its name."""
    function = outbox.handlers.get(destination.name)
    if function is None:
        return mask_url(destination.sink)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"handler:{getattr(function, '__module__', '?')}:{name}"


def _no_destinations() -> str:
    raise ConfigError(NO_DESTINATIONS)


def _destination(destination: Destination, outbox: Outbox) -> str:
    where = f"destination {destination.name!r}"
    for setting in ("secret", "auth"):
        secret = getattr(destination, setting)
        try:
            if secret is not None:
                secret.reveal()
        except ConfigError as error:
            raise ConfigError(f"{where}: {setting}: {error}") from None
    try:
        open_sink(destination, outbox.handlers)
    except MissingExtra as error:
        raise ConfigError(f"{where}: {error}") from None
    routed = any(destination.name in route.to for route in outbox.settings.routes)
    return sink_name(destination, outbox) + ("" if routed else " (no route leads to it)")


def _database(outbox: Outbox) -> str:
    settings = outbox.settings
    shown = mask_url(settings.database)
    if in_memory(settings.database):
        fix = "it is in memory, where no other process sees it; name a file, as in sqlite:///relaybox.db"
        raise ConfigError(f"database = {shown!r}: {fix}")
    try:
        check(settings.database, schema=settings.schema, prefix=settings.prefix)
        version = current_version(settings.database, schema=settings.schema, prefix=settings.prefix)
    except SchemaError as error:
        raise SchemaError(f"{shown}: {error}") from None
    except StoreError as error:
        fix = "start it, or choose another with --database, RELAYBOX_DATABASE or relaybox.toml"
        raise StoreError(f"{error}; {fix}") from error
    return f"{shown}, tables at version {version}"
