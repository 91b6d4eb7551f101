"""The tables come into every database the same way, however often, from however many processes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.values import mask_url
from relaybox.database import connect, migrations
from relaybox.database.migrations import MIGRATIONS, Migration, Outbox, check, current_version, ddl, migrate
from relaybox.database.schema import LONGEST_PREFIX, VERSION, make_tables
from relaybox.errors import ConfigError, MissingExtra, SchemaError, StoreError
from tests.databases import POSTGRESQL, engine
from tests.schema_snapshot import snapshot, transaction

PROCESSES = 4
MIGRATE_ON_SIGNAL = """
import json, sys
from relaybox.database.migrations import migrate
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(migrate(sys.argv[1])))
"""
HOSTILE = ['a"; drop table x;--', "a`b", "a b", "1a", "a'", "ä", "a.b", "x" * 41, "a\n"]

ALL = [migration.number for migration in MIGRATIONS]
SCHEMA_1 = Path(__file__).parent / "schema_1"

each_dialect = pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb", "sqlite"])
on_sqlite = pytest.mark.parametrize("kind", ["sqlite"])
on_mariadb = pytest.mark.parametrize("kind", ["mariadb"])
on_postgresql = pytest.mark.parametrize("kind", POSTGRESQL)
Fresh = Callable[[str], str]


@pytest.fixture
def first(kind: str, fresh_database: Fresh, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a database as the first release made it."""
    url = fresh_database(kind)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", MIGRATIONS[:1])
        assert migrate(url) == [1]
    return url


def dialect_of(kind: str) -> Any:
    return kind.partition("-")[0]


def execute_all(url: str, statements: list[str]) -> None:
    with engine(url).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def all_tables() -> sa.MetaData:
    metadata = sa.MetaData()
    make_tables(metadata)
    return metadata


def test_migrating_again_does_nothing_and_a_newer_database_is_left_alone(url: str) -> None:
    assert migrate(url) == ALL
    before = snapshot(url)
    assert migrate(url) == []
    assert snapshot(url) == before
    assert current_version(url) == VERSION == migrations.NEWEST
    check(url)
    execute_all(url, ["INSERT INTO outbox_migration (version) VALUES (7)"])
    assert migrate(url) == []
    assert current_version(url) == 7
    check(url)


@pytest.mark.full
def test_of_many_processes_at_once_one_migrates_and_the_others_find_it_done(url: str) -> None:
    command = [sys.executable, "-c", MIGRATE_ON_SIGNAL, url]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(PROCESSES)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, ends
    assert sorted(json.loads(out) for out, _ in ends) == [[]] * (PROCESSES - 1) + [ALL]


@each_dialect
def test_the_first_version_is_what_was_released(dialect: Any) -> None:
    released = (SCHEMA_1 / f"{dialect.replace('mysql', 'mariadb')}.sql").read_text()
    if dialect == "mysql":
        # Another collation, and other words that are reserved.
        released = released.replace("utf8mb4_nopad_bin", "utf8mb4_0900_bin")
        released = released.replace("`position`", "position").replace(" lag JSON", " `lag` JSON")
    statements = MIGRATIONS[0].statements(Outbox(dialect))
    # But for the white space: a line of a file holds several columns.
    assert (";\n".join(statements) + ";\n").split() == released.split()


def test_an_outbox_of_the_first_version_becomes_the_same_as_a_new_one(first: str, migrated: str) -> None:
    with pytest.raises(SchemaError, match="at version 1 and this release needs 3: run `relaybox migrate`"):
        check(first)
    assert migrate(first) == [2, 3]
    assert snapshot(first) == snapshot(migrated)
    check(first)


def test_metadata_create_all_brings_the_first_version_up_to_date(first: str) -> None:
    with transaction(first) as connection:
        all_tables().create_all(connection)
    check(first)
    assert migrate(first) == []


def test_an_outbox_of_the_first_version_can_be_taken_away(kind: str, first: str, url: str) -> None:
    execute_all(first, migrations.drop(Outbox(dialect_of(kind))))
    assert snapshot(first) == snapshot(url)


def test_the_next_version_is_applied_on_top_of_this(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_next_version(monkeypatch)
    needed = f"at version {VERSION} and this release needs {VERSION + 1}: run `relaybox migrate`"
    with pytest.raises(SchemaError, match=needed):
        check(migrated)
    assert migrate(migrated) == [VERSION + 1]
    assert migrate(migrated) == []
    check(migrated)
    assert "note" in columns(migrated, "outbox_relay")


def test_an_empty_database_gets_every_version(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_next_version(monkeypatch)
    assert migrate(url) == [*ALL, VERSION + 1]
    assert "note" in columns(url, "outbox_relay")


def add_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Migration(
        VERSION + 1,
        "a note for each relay",
        lambda outbox: [
            "ALTER TABLE outbox_relay ADD COLUMN note VARCHAR(10)",
            "INSERT INTO outbox_migration (version) VALUES (VERSION)".replace("VERSION", str(VERSION + 1)),
        ],
    )
    monkeypatch.setattr(migrations, "MIGRATIONS", (*MIGRATIONS, second))
    monkeypatch.setattr(migrations, "NEWEST", VERSION + 1)


def columns(url: str, table: str) -> set[str]:
    return {column["name"] for column in sa.inspect(engine(url)).get_columns(table)}


@pytest.mark.full
def test_on_mariadb_a_migration_that_was_cut_short_anywhere_is_completed(fresh_database: Fresh) -> None:
    whole = fresh_database("mariadb")
    migrate(whole)
    statements = ddl("mariadb")
    for done in range(1, len(statements)):
        url = fresh_database("mariadb")
        execute_all(url, statements[:done])
        recorded = sum(text.startswith("INSERT INTO outbox_migration") for text in statements[:done])
        assert current_version(url) == recorded
        assert migrate(url) == ALL[recorded:], f"after {done} statements"
        assert snapshot(url) == snapshot(whole), f"after {done} statements"
        assert current_version(url) == VERSION


@on_mariadb
def test_a_later_version_cut_short_is_completed(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_next_version(monkeypatch)
    execute_all(migrated, ["ALTER TABLE outbox_relay ADD COLUMN note VARCHAR(10)"])
    assert migrate(migrated) == [VERSION + 1]


def test_somebody_elses_table_of_the_same_name_is_an_error_and_not_taken_over(kind: str, url: str) -> None:
    execute_all(url, ["CREATE TABLE inbox_message (theirs INTEGER)"])
    before = snapshot(url)
    with pytest.raises(StoreError, match="already exists"):
        migrate(url)
    assert columns(url, "inbox_message") == {"theirs"}
    assert current_version(url) == 0
    if kind != "mariadb":
        assert snapshot(url) == before, "where DDL is transactional, nothing is left"


def test_metadata_creates_the_same_database_and_drops_all_of_it(url: str, migrated: str) -> None:
    empty, metadata = snapshot(url), all_tables()
    with transaction(url) as connection:
        metadata.create_all(connection)
        metadata.create_all(connection)
    assert snapshot(url) == snapshot(migrated)
    check(url)
    assert migrate(url) == []
    with transaction(url) as connection:
        metadata.drop_all(connection)
    assert snapshot(url) == empty
    assert migrate(url) == ALL
    with transaction(url) as connection:
        metadata.drop_all(connection)
    assert snapshot(url) == empty


def test_the_snapshot_sees_a_column_a_default_an_index_and_a_constraint(kind: str, migrated: str) -> None:
    seen = [snapshot(migrated)]
    for change in (
        "ALTER TABLE outbox_relay ADD COLUMN note VARCHAR(10)",
        "ALTER TABLE outbox_relay ADD COLUMN other VARCHAR(10) DEFAULT 'x'",
        "DROP INDEX idx_outbox_audit_at" + (" ON outbox_audit" if kind == "mariadb" else ""),
        "ALTER TABLE outbox_relay ADD COLUMN third INTEGER CHECK (third > 0)",
    ):
        execute_all(migrated, [change])
        seen.append(snapshot(migrated))
    assert all(one != other for index, one in enumerate(seen) for other in seen[:index])


def test_two_outboxes_of_different_prefixes_live_side_by_side(url: str) -> None:
    longest = "P" * LONGEST_PREFIX
    for prefix in ("", "billing_", longest, "select"):
        with pytest.raises(SchemaError, match="the tables are missing: run `relaybox migrate`"):
            check(url, prefix=prefix)
        assert migrate(url, prefix=prefix) == ALL
        assert migrate(url, prefix=prefix) == []
        check(url, prefix=prefix)
    assert f"{longest}outbox_event" in sa.inspect(engine(url)).get_table_names()


@on_postgresql
def test_on_postgresql_a_schema_is_created_and_gets_the_same_tables(url: str) -> None:
    assert migrate(url, schema="Outbox") == ALL
    assert migrate(url, schema="Outbox") == []
    check(url, schema="Outbox")
    assert snapshot(url)["tables"] == set()
    migrate(url)
    assert snapshot(url, schema="Outbox") == snapshot(url)


@on_postgresql
def test_on_postgresql_an_existing_schema_needs_no_right_to_create_one(url: str) -> None:
    role = f"owner_of_{sa.make_url(url).database}"
    execute_all(url, [f"CREATE ROLE {role} LOGIN", f"CREATE SCHEMA ours AUTHORIZATION {role}"])
    try:
        as_owner = sa.make_url(url).set(username=role).render_as_string(hide_password=False)
        assert migrate(as_owner, schema="ours") == ALL
    finally:
        execute_all(url, [f"DROP OWNED BY {role}", f"DROP ROLE {role}"])


@pytest.mark.parametrize("kind", ["postgresql-18", "mariadb"])
def test_a_user_without_the_right_to_migrate_learns_who_has_it(kind: str, fresh_database: Fresh) -> None:
    url = sa.make_url(fresh_database(kind))
    owner, role = url.render_as_string(hide_password=False), f"guest_{uuid4().hex[:8]}"
    create = [f"CREATE ROLE {role} LOGIN"]
    if kind == "mariadb":
        create = [f"CREATE USER {role} IDENTIFIED BY '{url.password}'"]
        create.append(f"GRANT SELECT ON {url.database}.* TO {role}")
    execute_all(owner, create)
    try:
        guest, advice = url.set(username=role), r"denied.*; run it as the owner, or review `relaybox sql`$"
        with pytest.raises(StoreError, match=advice) as error:
            migrate(guest.render_as_string(hide_password=False))
    finally:
        execute_all(owner, [f"DROP {'USER' if kind == 'mariadb' else 'ROLE'} {role}"])
    assert "LINE" not in str(error.value)
    assert "('" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("postgresql-18", "syntax error"), ("mariadb", "error in your SQL")]
)
def test_the_databases_error_is_shown_without_what_the_driver_adds(said: str, url: str) -> None:
    with pytest.raises(StoreError, match=said) as error, connect.connected(url) as execute:
        execute("SELEKT 1")
    reason = str(error.value).removeprefix(f"{mask_url(url)}: ")
    assert reason[0].isalpha()
    assert "LINE 1" not in reason
    assert "\\" not in reason


def test_a_sqlite_file_that_cannot_be_opened_is_reported_with_its_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"file: the directory {tmp_path}/gone does not exist$"):
        migrate(f"sqlite:///{tmp_path}/gone/x.db")
    (tmp_path / "x.db").mkdir()
    with pytest.raises(StoreError, match=rf"file: the directory {tmp_path} exists; see who may"):
        migrate(f"sqlite:///{tmp_path}/x.db")


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite://", "sqlite:///file:x?mode=memory&uri=true"]
)
def test_a_database_in_memory_is_not_migrated_for_nothing(url: str) -> None:
    with pytest.raises(
        ConfigError, match="it is in memory, so the tables would be lost at once; name a file"
    ):
        migrate(url)


def test_a_database_in_memory_that_others_share_is_migrated() -> None:
    name = f"file:{uuid4().hex}?mode=memory&cache=shared"
    with closing(sqlite3.connect(name, uri=True)):
        assert migrate(f"sqlite:///{name}&uri=true") == ALL
        assert migrate(f"sqlite:///{name}&uri=true") == []


def test_a_url_that_sqlalchemy_refuses_is_a_wrong_setting() -> None:
    refused = r"database = 'sqlite://\*\*\*@h/x': the driver does not take it so"
    with pytest.raises(ConfigError, match=refused) as error, connect.connected("sqlite://u:hush@h/x"):
        pass
    assert "hush" not in str(error.value)


@on_mariadb
def test_on_mariadb_a_schema_is_another_database_which_must_exist(url: str) -> None:
    name = f"other_{uuid4().hex[:8]}"
    with pytest.raises(StoreError, match=f"Unknown database '{name}'"):
        migrate(url, schema=name)
    execute_all(url, [f"CREATE DATABASE {name}"])
    try:
        assert migrate(url, schema=name) == ALL
        assert migrate(url, schema=name) == []
        assert snapshot(url)["tables"] == set()
        migrate(url)
        assert snapshot(url, schema=name) == snapshot(url)
    finally:
        execute_all(url, [f"DROP DATABASE {name}"])


@on_sqlite
def test_on_sqlite_a_schema_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="schema = 'x': SQLite has no schemas"):
        migrate(url, schema="x")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("setting", ["schema", "prefix"])
@each_dialect
def test_an_invalid_name_is_refused_at_once(dialect: Any, setting: str, name: str) -> None:
    arguments: dict[str, Any] = {setting: name}
    with pytest.raises(ConfigError, match=f"{setting} = "):
        ddl(dialect, **arguments)
    nowhere = "/no/where.db" if dialect == "sqlite" else "nobody@127.0.0.1:1/nowhere"
    with pytest.raises(ConfigError, match=f"{setting} = "):
        migrate(f"{dialect}://{nowhere}", **arguments)


def test_a_prefix_too_long_for_the_names_of_indexes_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"use up to {LONGEST_PREFIX} characters"):
        ddl("postgresql", prefix="p" * (LONGEST_PREFIX + 1))


def test_the_statements_come_in_the_same_order_every_time() -> None:
    command = [sys.executable, "-c", "from relaybox.database.migrations import ddl; print(ddl('mariadb'))"]
    texts = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(4)}
    assert len(texts) == 1


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_database_that_cannot_be_reached_is_named_without_its_password(scheme: str) -> None:
    with pytest.raises(StoreError) as error:
        migrate(f"{scheme}://me:hush@127.0.0.1:1/db")
    assert str(error.value).startswith(f"{scheme}://***@127.0.0.1:1/db: ")
    assert "hush" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_url_that_the_driver_cannot_read_is_not_repeated_with_its_password() -> None:
    with pytest.raises(StoreError) as error:
        migrate("postgresql://me:hush@[::1]x/db")
    assert "hush" not in str(error.value)
    with pytest.raises(ConfigError) as refused:
        migrate("mysql://me:hush@host:port/db")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("postgresql://h/d", "psycopg", "postgres"), ("mysql://h/d", "asyncmy", "mysql")],
)
def test_a_missing_driver_says_what_to_install(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.errors", None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed: pip install 'relaybox\[{extra}\]'"):
        migrate(url)


@on_mariadb
def test_on_mariadb_it_runs_inside_a_running_loop_too(url: str) -> None:
    async def main() -> list[int]:
        return migrate(url)

    assert asyncio.run(main()) == ALL


@on_mariadb
def test_a_migration_gives_up_waiting_for_another(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "PATIENCE", 0)
    with engine(url).connect() as other:
        other.exec_driver_sql("SELECT GET_LOCK(CONCAT('relaybox.', MD5(DATABASE())), 0)")
        with pytest.raises(StoreError, match="another migration has been running"):
            migrate(url)


def test_a_sqlite_file_that_does_not_exist_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    assert current_version(url) == 0
    assert list(tmp_path.iterdir()) == []


@on_sqlite
def test_a_sqlite_migration_waits_for_another_writer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "BUSY", 0.05)
    with connect.connected(url) as execute:
        execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            migrate(url)
    assert migrate(url) == ALL


def test_the_server_says_its_dialect(kind: str, url: str) -> None:
    assert migrations.server_dialect(url) == dialect_of(kind)


def test_the_tables_of_mysql_and_mariadb_differ_in_their_collation_only() -> None:
    def neutral(statements: list[str], collation: str) -> set[str]:
        return {statement.replace(collation, "…").replace("`", "") for statement in statements}

    assert neutral(ddl("mysql"), "utf8mb4_0900_bin") == neutral(ddl("mariadb"), "utf8mb4_nopad_bin")


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="dialect = 'oracle'"):
        Outbox("oracle")  # type: ignore[arg-type]
