"""The schema check: how tables differ from those of this release, and the SQL that repairs them."""

from __future__ import annotations

from collections.abc import Iterator

from relaybox.core.commands import Program
from relaybox.database.catalogue import Column, Index, Table, found_tables, wanted_tables
from relaybox.database.migrations import NEWEST, Outbox, quoted
from relaybox.database.repair import Repair
from relaybox.database.statements import server
from relaybox.operate.doctor.check import DatabaseContext, Finding, Results, Unseen, check


async def recorded_version(context: DatabaseContext) -> int:
    """Return the version of the tables, 0 if there are none."""
    outbox = context.outbox
    table = outbox.tables().migration
    name = quoted(outbox, table.schema, table.name) if outbox.dialect == "postgresql" else table.name
    exists = server.TABLE_EXISTS.get(outbox.dialect, server.TABLE_EXISTS_MYSQL)
    [(found,)] = await context.ask(exists, table=name, schema=outbox.schema)
    [(version,)] = await context.ask(server.NEWEST_MIGRATION) if found else [(0,)]
    return version or 0


@check()
async def schema(context: DatabaseContext) -> Results:
    """Find every difference from this release's tables; for older tables, only that they are old."""
    if context.version < NEWEST:
        title = f"the tables are at version {context.version}, and this release needs {NEWEST}"
        yield Finding("error", title, "commands and relays refuse to work on them", Program.migrate)
        return
    if context.version > NEWEST:
        title = f"the tables are at version {context.version}, and this release knows {NEWEST}"
        detail = "which is well while releases are changed; a newer one made them"
        yield Finding("info", title, detail, "pip install --upgrade relaybox")
    wanted = wanted_tables(context.outbox)
    found, hidden = await found_tables(context.ask, context.outbox, wanted.keys())
    if hidden:
        yield Unseen(f"the connected role may not know what {', '.join(sorted(hidden))} look like")
    known = {name: table for name, table in wanted.items() if name not in hidden}
    for finding in differences(context.outbox, known, found, newer=context.version > NEWEST):
        yield finding


def differences(
    outbox: Outbox, wanted: dict[str, Table], found: dict[str, Table], *, newer: bool = False
) -> Iterator[Finding]:
    """Yield the differences; ``newer``: extra columns are those of a newer release."""
    repair, beside = Repair(outbox), () if newer else (_columns_beside,)
    for name, table in wanted.items():
        if name not in found:
            detail = "the version that is recorded says that it is there; statements that need it fail"
            yield Finding("error", f"the table {name} is missing", detail, repair.statements(*table.create))
            continue
        for look in (_columns, *beside, _key, _checks, _indexes, _others):
            yield from look(repair, name, table, found[name])


def _columns(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for column, wanted in table.columns.items():
        if column in there.columns:
            yield from _column(repair, name, column, wanted, there.columns[column])
        else:
            title, detail = f"the column {name}.{column} is missing", "statements that name it fail"
            yield Finding("error", title, detail, repair.columns.add(name, column, wanted))


def _columns_beside(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for column, beside in there.columns.items():
        title = f"the column {name}.{column} is not of this release"
        if column in table.columns:
            continue
        if beside.nullable or beside.filled:
            yield Finding("info", title, "nothing here reads or writes it", repair.columns.drop(name, column))
        else:
            detail = "it is NOT NULL and has no default: every INSERT of ours fails"
            fix = repair.columns.drop_not_null(name, column, beside)
            yield Finding("error", f"{title}, and must have a value", detail, fix)


def _column(repair: Repair, name: str, column: str, wanted: Column, there: Column) -> Iterator[Finding]:
    whole, where = f"the column {name}.{column}", (name, column, wanted)
    if there.type != wanted.type:
        detail = f"it is {there.type} and should be {wanted.type}"
        yield Finding("error", f"{whole} has another type", detail, repair.columns.change_type(*where))
    elif wanted.collation and (there.collation or "").lower() != wanted.collation.lower():
        detail = f"it is {there.collation} and should be {wanted.collation}, which compares byte by byte"
        yield Finding("warning", f"{whole} has another collation", detail, repair.columns.change_type(*where))
    if there.nullable and not wanted.nullable:
        detail = "it should be NOT NULL: a row without it cannot be delivered"
        yield Finding("warning", f"{whole} may be null", detail, repair.columns.set_not_null(*where))
    if wanted.nullable and not there.nullable:
        detail = "rows that rightly have no value there are refused"
        yield Finding("error", f"{whole} may not be null", detail, repair.columns.drop_not_null(*where))
    if wanted.filled and not there.filled:
        detail = "an INSERT relies on it"
        yield Finding("error", f"{whole} has no default", detail, repair.columns.set_default(*where))


def _key(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    if there.key != table.key:
        is_now = f"it is ({', '.join(there.key)})" if there.key else "there is none"
        detail = f"{is_now} and should be ({', '.join(table.key)})"
        fix = repair.add_key(name, table.key, bool(there.key))
        yield Finding("error", f"the table {name} has another primary key", detail, fix)


def _checks(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for constraint, wanted in table.checks.items():
        found = there.checks.get(constraint)
        if found is None:
            title = f"the table {name} has no constraint {constraint}"
            detail = f"nothing keeps a row from an impossible state: {wanted.condition or 'see relaybox sql'}"
            yield Finding("warning", title, detail, repair.add_check(name, constraint, wanted))
        elif not found.valid:
            title = f"the constraint {constraint} of {name} was never validated"
            detail = "rows that were there before it may break it"
            yield Finding("info", title, detail, repair.validate(name, constraint))


def _indexes(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for index, wanted in table.indexes.items():
        found = there.indexes.get(index)
        if found is None:
            detail = f"without it the whole of {name} is read where a few rows would do"
            yield Finding("error", f"the index {index} is missing", detail, repair.create_index(wanted))
        elif not found.valid:
            detail = f"it is kept up and never used: building it on {name} failed, or is not over yet"
            yield Finding("error", f"the index {index} is invalid", detail, repair.rebuild_index(index))
        elif (found.columns, found.partial) != (wanted.columns, wanted.partial):
            detail = f"it is on {_on(found)} and should be on {_on(wanted)}"
            fix = repair.replace_index(name, index, wanted)
            yield Finding("error", f"the index {index} is another one", detail, fix)


def _others(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for trigger, text in table.triggers.items():
        if trigger not in there.triggers:
            detail = "new rows get no position, and so no place in the order"
            yield Finding("error", f"the trigger {trigger} is missing", detail, repair.statements(text))
    unset = {option: value for option, value in table.options.items() if option not in there.options}
    if unset:
        title = f"the table {name} lacks settings of its storage"
        detail = f"{_listed(unset)}: claims cannot stay on their page, and dead rows are cleaned up too late"
        yield Finding("warning", title, detail, repair.set_options(name, unset))
    known = {option: value for option, value in there.options.items() if option in table.options}
    other = {option: value for option, value in known.items() if table.options[option] != value}
    if "engine" in other:
        detail = f"it is {other.pop('engine')}, which has no transactions: events would exist without theirs"
        fix = repair.set_engine(name, table.options["engine"])
        yield Finding("error", f"the table {name} is not of the engine InnoDB", detail, fix)
    if other:
        title = f"the storage of {name} is set otherwise than by this release"
        usual = {option: table.options[option] for option in other}
        detail = f"{_listed(other)}; this release sets {_listed(usual)}"
        yield Finding("info", title, detail, repair.set_options(name, usual))


def _on(index: Index) -> str:
    return f"({', '.join(index.columns)}){' WHERE …' if index.partial else ''}"


def _listed(options: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())
