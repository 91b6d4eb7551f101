"""What a relay needs, and whether the connected role may do it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding, Unseen
from relaybox.grants import CHANGE
from relaybox.migrations import Outbox, quoted
from relaybox.schema import MYSQL

_WHO = {
    "postgresql": "SELECT current_user",
    "mysql": "SELECT CURRENT_USER()",
    "mariadb": "SELECT CURRENT_USER()",
}
_MAY = """
SELECT name, privilege, has_table_privilege(CAST(to_regclass(name) AS oid), privilege)
FROM unnest(CAST(ARRAY[:names] AS text[])) AS name, unnest(CAST(ARRAY[:privileges] AS text[])) AS privilege
WHERE to_regclass(name) IS NOT NULL"""
_USAGE = "SELECT has_schema_privilege(CAST(:schema AS text), 'USAGE')"
_GRANT = re.compile(r"GRANT (.+?) ON (?:TABLE )?(\S+) TO ")

READ, CHANGES = "SELECT", ("INSERT", "UPDATE", "DELETE")


async def look(context: DatabaseContext) -> Results:
    """What is lacking, by table; a role that only reads is not taken for a relay's."""
    outbox = context.outbox
    if outbox.dialect == "sqlite":
        return
    [(role,)] = await context.ask(_WHO[outbox.dialect])
    needed = _needed(outbox)
    held = await _held(context, needed)
    lacking = {
        table: missing
        for table, of in needed.items()
        if table in held and (missing := [one for one in of if one not in held[table]])
    }
    if not lacking:
        return
    if all(READ not in of for of in lacking.values()) and not any(
        change in of for of in held.values() for change in CHANGES
    ):
        yield Unseen(f"{role} may only read: whether a relay's role has its rights cannot be told from it")
        return
    yield _finding(outbox, str(role), lacking)


def _needed(outbox: Outbox) -> dict[str, list[str]]:
    tables = outbox.tables()
    every = [getattr(tables, field.name) for field in fields(tables)]
    return {
        table.name: [READ] if table is tables.migration else CHANGE.split(", ")
        for table in every
    }  # fmt: skip


async def _held(context: DatabaseContext, needed: Mapping[str, list[str]]) -> Mapping[str, Collection[str]]:
    """The rights to each table that is there."""
    outbox = context.outbox
    if outbox.dialect in MYSQL:
        rows = await context.ask("SHOW GRANTS")
        [(name,)] = await context.ask("SELECT COALESCE(:schema, DATABASE())", schema=outbox.schema)
        return parse_grants([str(row[0]) for row in rows], str(name), needed)
    if outbox.schema and (await context.ask(_USAGE, schema=outbox.schema))[0][0] is False:
        return dict.fromkeys(needed, ())
    names = {quoted(outbox, outbox.schema, table): table for table in needed}
    rows = await context.ask(_MAY, names=list(names), privileges=CHANGE.split(", "))
    # Of a table that is not there the schema's check tells.
    held: dict[str, set[str]] = {names[name]: set() for name, _, _ in rows}
    for name, privilege, may in rows:
        if may:
            held[names[name]].add(privilege)
    return held


def parse_grants(lines: Iterable[str], schema: str, tables: Iterable[str]) -> dict[str, set[str]]:
    """What SHOW GRANTS says of these tables."""
    held: dict[str, set[str]] = {table: set() for table in tables}
    for line in lines:
        match = _GRANT.match(line)
        if match is None:
            continue
        place, _, table = match[2].replace("`", "").partition(".")
        if place != "*" and not _like(place).fullmatch(schema):
            continue
        every = match[1].startswith("ALL PRIVILEGES")
        known = CHANGE.split(", ")
        granted = {one for one in known if every or one in re.findall(r"[A-Z]+", match[1])}
        for name in held if table == "*" else held.keys() & {table}:
            held[name] |= granted
    return held


def _like(pattern: str) -> re.Pattern[str]:
    """A pattern of MySQL's for names of databases."""
    parts = re.split(r"(\\[_%]|[_%])", pattern)
    words = {"_": ".", "%": ".*"}
    return re.compile("".join(words.get(part, re.escape(part.removeprefix("\\"))) for part in parts))


def _finding(outbox: Outbox, role: str, lacking: Mapping[str, list[str]]) -> Finding:
    whom = _grantee(outbox, role)
    usage = []
    if outbox.dialect == "postgresql" and outbox.schema:
        usage = [f"GRANT USAGE ON SCHEMA {quoted(outbox, outbox.schema)} TO {whom};"]
    grants = [
        f"GRANT {', '.join(of)} ON {quoted(outbox, outbox.schema, table)} TO {whom};"
        for table, of in lacking.items()
    ]
    detail = "; ".join(f"no {', '.join(of)} on {table}" for table, of in lacking.items())
    title = f"{role} lacks rights that a relay needs"
    return Finding("error", title, detail, "\n".join([*usage, *grants]))


def _grantee(outbox: Outbox, role: str) -> str:
    user, at, host = role.partition("@")
    return f"{quoted(outbox, user)}@{quoted(outbox, host)}" if at and outbox.dialect in MYSQL else (
        quoted(outbox, role)
    )  # fmt: skip
