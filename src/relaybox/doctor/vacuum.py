"""Autovacuum, and the rows that it has not cleaned up."""

from __future__ import annotations

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding
from relaybox.migrations import quoted

DEAD = 100_000
"""So many dead rows are told, where they are also more than half of those that live."""

_SERVER = "SELECT name FROM pg_settings WHERE name IN ('autovacuum', 'track_counts') AND setting = 'off'"
_TABLES = """
SELECT c.relname, c.reloptions, s.n_live_tup, s.n_dead_tup, GREATEST(s.last_vacuum, s.last_autovacuum)
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(CAST(ARRAY[:names] AS text[])) AS name)"""
_OFF = ("autovacuum_enabled=false", "autovacuum_enabled=off", "autovacuum_enabled=no", "autovacuum_enabled=0")


async def look(context: DatabaseContext) -> Results:
    """Whether it is on, for the server and for each table, and whether it keeps up."""
    outbox = context.outbox
    for (setting,) in await context.ask(_SERVER):
        detail = "dead rows are never cleaned up, and claims become slower with every event"
        fix = f"ALTER SYSTEM SET {setting} = on;\nSELECT pg_reload_conf();"
        yield Finding("error", f"{setting} is off on this server", detail, fix)
    tables = outbox.metadata().tables.values()
    names = {table.name: quoted(outbox, table.schema, table.name) for table in tables}
    for name, options, live, dead, at in await context.ask(_TABLES, names=list(names.values())):
        if any(option in _OFF for option in options or ()):
            detail = "its dead rows are never cleaned up, and claims become slower with every event"
            fix = f"ALTER TABLE {names[name]} RESET (autovacuum_enabled);"
            yield Finding("error", f"autovacuum is off for {name}", detail, fix)
        if dead and dead > DEAD and dead > live / 2:
            when = "never" if at is None else f"last at {at:%Y-%m-%d %H:%M:%S %Z}"
            detail = f"beside {live:,} that live; it was vacuumed {when}"
            fix = f"VACUUM (ANALYZE) {names[name]};"
            yield Finding("warning", f"{name} has {dead:,} dead rows", detail, fix)
