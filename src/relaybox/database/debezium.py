"""Builds the publication, slot and connector configuration for a Debezium destination.

Its rows are inserted as delivered, because Debezium reads them from the log. Only inserts are published, so
rows can be removed at any time.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import sqlalchemy as sa

from relaybox.core.settings import Destination, Settings, needs_postgresql
from relaybox.core.values import wrong
from relaybox.database.connect import connected
from relaybox.database.migrations import Outbox, quoted
from relaybox.errors import ConfigError, did_you_mean

ROLE = "relaybox_debezium"

PASSWORD = "${env:RELAYBOX_DEBEZIUM_PASSWORD}"
"""A reference that Kafka Connect replaces with the secret."""

HEADERS = {
    "event_id": "event-id",
    "event_type": "event-type",
    "aggregate_type": "aggregate-type",
    "aggregate_id": "aggregate-id",
    "headers": "headers",
}

TEXT = "org.apache.kafka.connect.storage.StringConverter"

NAMES = {
    "publication": "SELECT pubname FROM pg_publication",
    "slot": "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()",
}

CREATE_ROLE = """DO $$ BEGIN
    CREATE ROLE {role} LOGIN REPLICATION;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$"""


def find(settings: Settings, name: str | None = None) -> Destination:
    """Return the named destination, or the only Debezium one; raise ``ConfigError`` if there is none."""
    every = {one.name: one for one in settings.destinations if one.handed_over}
    if name is None:
        if len(every) > 1:
            raise ConfigError(f"several destinations are Debezium's: name one of {', '.join(every)}")
        if not every:
            raise ConfigError("no destination is Debezium's: write sink = 'debezium:' for one")
        return _on_postgresql(settings, *every.values())
    known = {one.name: one for one in settings.destinations}
    if name not in known:
        raise ConfigError(f"no destination is called {name!r}{did_you_mean(name, every or known)}")
    if name not in every:
        scheme = known[name].scheme
        raise wrong("destination", name, f"a relay sends to it ({scheme}:), and no connector")
    return _on_postgresql(settings, every[name])


def statements(settings: Settings, destination: Destination) -> list[str]:
    """Return the SQL to run before the first event: Debezium misses commits made before the slot exists."""
    outbox = Outbox("postgresql", settings.schema, settings.prefix)
    event = quoted(outbox, settings.schema, outbox.tables().event.name)
    role, name = quoted(outbox, ROLE), _name(settings, destination)
    usage = [f"GRANT USAGE ON SCHEMA {quoted(outbox, settings.schema)} TO {role}"] if settings.schema else []
    return [
        "-- Needs wal_level = logical and PostgreSQL 15 or newer. Not all in one transaction.",
        CREATE_ROLE.format(role=role),
        *usage,
        f"GRANT SELECT ON {event} TO {role}",
        f"CREATE PUBLICATION {quoted(outbox, name)} FOR TABLE {event} "
        f"WHERE (destination = {_literal(destination.name)}) WITH (publish = 'insert')",
        f"SELECT pg_create_logical_replication_slot({_literal(name)}, 'pgoutput')",
    ]


def missing(settings: Settings, destination: Destination) -> list[str]:
    """Ask the server which of publication and slot are missing."""
    name = _name(settings, destination)
    with connected(settings.database) as execute:
        return [what for what, query in NAMES.items() if all(found != name for [found] in execute(query))]


def connector(settings: Settings, destination: Destination) -> dict[str, Any]:
    """Return the body for Kafka Connect's ``POST /connectors``."""
    name = _name(settings, destination)
    config = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        **_database(settings),
        "topic.prefix": name,
        "plugin.name": "pgoutput",
        "slot.name": name,
        "publication.name": name,
        "publication.autocreate.mode": "disabled",
        # No snapshot: the table has rows of other destinations, and keeps its own only for a time.
        "snapshot.mode": "no_data",
        "table.include.list": _table(settings),
        "tombstones.on.delete": "false",
        # Otherwise Debezium adds headers about itself to each message.
        "extended.headers.enabled": "false",
        # Confirms the log position while no events arrive, so that the server can drop old log.
        "heartbeat.interval.ms": "10000",
        "heartbeat.action.query": "SELECT pg_logical_emit_message(false, 'relaybox', '')",
        "message.prefix.exclude.list": ".*",
        "key.converter": TEXT,
        "value.converter": TEXT,
        "header.converter": TEXT,
        "transforms": "outbox",
        **{f"transforms.outbox.{option}": value for option, value in _router().items()},
    }
    return {"name": name, "config": config}


def _router() -> dict[str, str]:
    return {
        "type": "io.debezium.transforms.outbox.EventRouter",
        "table.field.event.id": "event_id",
        "table.field.event.key": "ordering_key",
        "table.field.event.type": "event_type",
        "table.field.event.payload": "payload",
        # Keep the payload as JSON text: a schema loses lists of mixed types.
        "table.expand.json.payload": "false",
        "table.fields.additional.placement": ",".join(
            f"{column}:header:{header}" for column, header in HEADERS.items()
        ),
        "route.by.field": "aggregate_type",
        "route.topic.replacement": "${routedByValue}-events",
    }


def _database(settings: Settings) -> dict[str, str]:
    url = sa.make_url(settings.database)
    given = {
        "database.hostname": url.host or "localhost",
        "database.port": str(url.port or 5432),
        "database.user": ROLE,
        "database.password": PASSWORD,
        "database.dbname": url.database or url.username or "postgres",
    }
    sslmode = url.query.get("sslmode")
    return given | ({"database.sslmode": sslmode} if isinstance(sslmode, str) else {})


def _table(settings: Settings) -> str:
    """Return a regular expression that matches the table in any schema if none is configured."""
    table = Outbox("postgresql", settings.schema, settings.prefix).tables().event.name
    return rf"{settings.schema or '[^.]+'}\.{table}"


def _name(settings: Settings, destination: Destination) -> str:
    """Return a name that is valid for a slot; a digest keeps changed names unique."""
    whole = "_".join(
        part for part in ("relaybox", settings.schema, settings.prefix, destination.name) if part
    )
    plain = re.sub(r"[^a-z0-9_]", "_", whole.lower())
    if plain == whole and len(plain) <= 63:
        return plain
    return f"{plain[:50]}_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def _literal(text: str) -> str:
    """Quote a string for PostgreSQL, where a backslash has no special meaning."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def _on_postgresql(settings: Settings, destination: Destination) -> Destination:
    if not settings.database.startswith("postgresql:"):
        raise needs_postgresql(destination, settings.database.partition(":")[0])
    return destination
