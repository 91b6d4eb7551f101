"""The doctor says nothing of a healthy set-up, finds each planted problem, and its advice fixes it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from celery import Celery
from typer.testing import CliRunner

from relaybox.cli import app
from relaybox.database.roles import grants
from relaybox.operate.doctor import CHECKS, Finding, database, examine
from relaybox.operate.doctor.check import Context, Results
from relaybox.operate.doctor.database import durability, outdated, parse_grants
from tests.conftest import available
from tests.databases import EVERY_KIND, KINDS, engine
from tests.integration.clinic import Clinic
from tests.schema_snapshot import run_script
from tests.servers import mariadb, pgbouncer, postgres15, postgres18
from tests.waiting import wait_for

Make = Callable[[str], str]


@pytest.fixture(scope="module")
def postgres18_url() -> Iterator[str]:
    """Run a server for these tests alone: the doctor examines all of it and would find what others do."""
    with available("PostgreSQL 18", postgres18.server(durable=True, own=["autovacuum=on"])) as url:
        yield url


@pytest.fixture(scope="module")
def pgbouncer_url(postgres18_url: str) -> Iterator[str]:
    """Run a pooler in front of that server."""
    with available("PgBouncer", pgbouncer.server(postgres18_url)) as url:
        yield url


@pytest.fixture(scope="module")
def postgres15_url() -> Iterator[str]:
    """Run a server for these tests alone."""
    with available("PostgreSQL 15", postgres15.server(durable=True, own=["autovacuum=on"])) as url:
        yield url


@pytest.fixture(scope="module")
def mariadb_url() -> Iterator[str]:
    """Run a server for these tests alone."""
    with available("MariaDB", mariadb.server(durable=True)) as url:
        yield url


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "RELAYBOX_DATABASE", "RELAYBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clinic(request: pytest.FixtureRequest, migrated_database: Make, tmp_path: Path) -> Clinic:
    return Clinic(migrated_database(getattr(request, "param", "sqlite")), tmp_path)


on_every_database = pytest.mark.parametrize("clinic", EVERY_KIND, indirect=True)
on_each_kind = pytest.mark.parametrize("clinic", KINDS, indirect=True)
on_postgresql = pytest.mark.parametrize("clinic", ["postgresql-18"], indirect=True)
on_mariadb = pytest.mark.parametrize("clinic", ["mariadb"], indirect=True)


@on_every_database
def test_nothing_is_said_of_a_healthy_set_up_before_and_after_it_has_delivered(clinic: Clinic) -> None:
    assert clinic.findings() == []
    assert clinic.run("doctor") == "nothing found (14 checks)\n"
    clinic.emit()
    clinic.run("drain")
    assert clinic.findings() == []


@on_postgresql
def test_nothing_is_written(clinic: Clinic) -> None:
    clinic.emit()
    written = []
    with psycopg.connect(clinic.url, autocommit=True) as connection:
        # Whatever writes takes a number; the server's own upkeep may take one now and then.
        for _ in range(3):
            before = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
            clinic.findings("--skip", "listener")
            after = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
            written.append(before != after)
    assert not all(written)


@on_postgresql
@pytest.mark.parametrize(
    ("line", "table"), [('schema = "ours"', "ours.outbox_event"), ('prefix = "shop_"', "shop_outbox_event")]
)
def test_nothing_is_said_of_tables_with_other_names(clinic: Clinic, line: str, table: str) -> None:
    clinic.configure(more=line)
    clinic.run("migrate")
    assert clinic.findings() == []
    clinic.sql(f"ALTER TABLE {table} DROP COLUMN error_message")
    clinic.repair("column .*error_message is missing")


OF_TABLES = ("--only", "schema", "--only", "vacuum")
INVALID = """UPDATE pg_index SET indisvalid = false
    WHERE indexrelid = 'idx_outbox_event_pending_next_attempt'::regclass"""
ANOTHER = """DROP INDEX idx_outbox_event_key_head;
    CREATE INDEX idx_outbox_event_key_head ON outbox_event (ordering_key)"""
DRIFT = {
    "postgresql-18": [
        ("DROP INDEX idx_outbox_event_failed", "index idx_outbox_event_failed is missing"),
        (INVALID, "index idx_outbox_event_pending_next_attempt is invalid"),
        (ANOTHER, "index idx_outbox_event_key_head is another one"),
        ("ALTER TABLE outbox_event ALTER max_attempts TYPE bigint", "max_attempts has another type"),
        ('ALTER TABLE outbox_event ALTER status TYPE varchar(20) COLLATE "POSIX"', "another collation"),
        ("ALTER TABLE outbox_event ALTER event_id DROP NOT NULL", "event_id may be null"),
        ("ALTER TABLE outbox_destination ALTER paused_by SET NOT NULL", "paused_by may not be null"),
        ("ALTER TABLE outbox_event ALTER status DROP DEFAULT", "status has no default"),
        ("ALTER TABLE outbox_event ALTER position DROP IDENTITY", "position has no default"),
        ("ALTER TABLE outbox_event DROP COLUMN error_message", "column .*error_message is missing"),
        ("ALTER TABLE outbox_event ADD extra text", "column .*extra is not of this release$"),
        ("ALTER TABLE outbox_event ADD extra text NOT NULL", "extra is not of this release, and must have"),
        ("ALTER TABLE outbox_event DROP CONSTRAINT outbox_event_lease", "no constraint outbox_event_lease"),
        ("ALTER TABLE outbox_attempt DROP CONSTRAINT outbox_attempt_pkey", "another primary key"),
        ("ALTER TABLE outbox_event RESET (fillfactor)", "lacks settings of its storage"),
        ("ALTER TABLE outbox_event SET (fillfactor = 80)", "is set otherwise than by this release"),
        ("ALTER TABLE outbox_event SET (autovacuum_enabled = false)", "autovacuum is off for outbox_event"),
        ("DROP TABLE outbox_stats", "table outbox_stats is missing"),
    ],
    "mariadb": [
        ("DROP INDEX idx_outbox_event_due ON outbox_event", "index idx_outbox_event_due is missing"),
        ("ALTER TABLE outbox_event MODIFY max_attempts BIGINT NOT NULL DEFAULT 5", "another type"),
        ("ALTER TABLE outbox_event MODIFY event_type VARCHAR(100) NOT NULL", "another collation"),
        ("ALTER TABLE outbox_event DROP COLUMN error_message", "column .*error_message is missing"),
        ("ALTER TABLE outbox_event DROP CONSTRAINT outbox_event_lease", "no constraint outbox_event_lease"),
        ("ALTER TABLE outbox_event ALTER status DROP DEFAULT", "status has no default"),
        ("ALTER TABLE outbox_attempt ENGINE = Aria", "outbox_attempt is not of the engine InnoDB"),
        ("ALTER TABLE outbox_event ADD extra TEXT NOT NULL", "extra is not of this release, and must have"),
        ("DROP TABLE outbox_stats", "table outbox_stats is missing"),
    ],
    "sqlite": [
        ("DROP INDEX idx_outbox_event_failed", "index idx_outbox_event_failed is missing"),
        (ANOTHER, "index idx_outbox_event_key_head is another one"),
        ("DROP TRIGGER outbox_event_position", "trigger outbox_event_position is missing"),
        ("ALTER TABLE outbox_event DROP COLUMN error_message", "column .*error_message is missing"),
        ("DROP TABLE outbox_stats", "table outbox_stats is missing"),
    ],
}


@pytest.mark.parametrize("kind", DRIFT)
@pytest.mark.full
def test_every_drift_of_the_schema_is_found_and_fixed_by_its_sql(
    kind: str, migrated_database: Make, tmp_path: Path
) -> None:
    clinic = Clinic(migrated_database(kind), tmp_path)
    for plant, title in DRIFT[kind]:
        for statement in plant.split(";"):
            clinic.sql(statement)
        finding = clinic.only_finding(title, *OF_TABLES)
        clinic.apply(finding["fix"])
        if "must have" in title:
            # Nothing that is not ours is dropped: it may only be empty from now on.
            clinic.only_finding("extra is not of this release$", *OF_TABLES)
            clinic.sql("ALTER TABLE outbox_event DROP COLUMN extra")
        assert clinic.findings(*OF_TABLES) == [], plant
    assert clinic.findings() == []


@on_every_database
def test_old_tables_are_reported_once_and_migrated(clinic: Clinic) -> None:
    for table in ("outbox_sample", "outbox_operation", "outbox_setting"):
        clinic.sql(f"DROP TABLE {table}")
    clinic.sql("DELETE FROM outbox_migration WHERE version > 1")
    finding = clinic.repair("tables are at version 1, and this release needs 3")
    assert (finding["level"], finding["fix"]) == ("error", "relaybox migrate")


@on_each_kind
def test_newer_tables_are_no_error(clinic: Clinic) -> None:
    clinic.sql("INSERT INTO outbox_migration (version) VALUES (99)")
    clinic.sql("ALTER TABLE outbox_event ADD COLUMN of_the_future INTEGER")
    finding = clinic.only_finding("at version 99")
    assert finding["level"] == "info"


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_missing_tables_are_reported(kind: str, fresh_database: Make, tmp_path: Path) -> None:
    clinic = Clinic(fresh_database(kind), tmp_path)
    # On SQLite there is not even a file, and looking makes none.
    finding = clinic.only_finding("cannot be reached" if kind == "sqlite" else "the tables are missing")
    assert "relaybox migrate" in finding["fix"]
    if kind == "sqlite":
        assert not Path(sa.make_url(clinic.url).database or "").exists()
    clinic.run("migrate")
    assert clinic.findings() == []


def named_roles() -> dict[str, str]:
    """Create the roles of ``relaybox sql --grants`` under other names."""
    mark = uuid4().hex[:8]
    return {role: f"{role}_{mark}" for role in ("emitter", "relay", "viewer", "consumer")}


@pytest.fixture
def roles(clinic: Clinic) -> Iterator[dict[str, str]]:
    roles = named_roles()
    run_script(clinic.url, ";".join(grants("postgresql", **roles)))
    run_script(clinic.url, ";".join(f"ALTER ROLE {name} LOGIN" for name in roles.values()))
    owner = clinic.url
    yield roles
    everyone = ", ".join(roles.values())
    run_script(owner, f"DROP OWNED BY {everyone}; DROP ROLE {everyone}")


def connect_as(clinic: Clinic, role: str) -> str:
    """Have commands connect as this role; the owner's URL."""
    owner = clinic.url
    clinic.url = sa.make_url(owner).set(username=role).render_as_string(hide_password=False)
    return owner


@on_postgresql
def test_a_right_that_a_relay_lacks_is_named_and_granted(clinic: Clinic, roles: dict[str, str]) -> None:
    clinic.sql(f"REVOKE UPDATE, DELETE ON outbox_event FROM {roles['relay']}")
    clinic.sql(f"REVOKE INSERT ON outbox_audit FROM {roles['relay']}")
    owner = connect_as(clinic, roles["relay"])
    finding = clinic.only_finding("lacks rights that a relay needs")
    assert "no UPDATE, DELETE on outbox_event; no INSERT on outbox_audit" in finding["detail"]
    run_script(owner, finding["fix"])
    assert clinic.findings() == []


@on_postgresql
def test_a_viewer_learns_what_it_cannot_see_and_finds_the_rest(clinic: Clinic, roles: dict[str, str]) -> None:
    owner = connect_as(clinic, roles["viewer"])
    with psycopg.connect(owner) as beside:
        beside.execute("SELECT 1")
        document = clinic.report()
    assert document["findings"] == []
    assert {one["check"] for one in document["unseen"]} == {"privileges", "transactions"}
    with psycopg.connect(owner) as connection:
        connection.execute("DROP INDEX idx_outbox_event_failed")
    [finding] = clinic.report()["findings"]
    assert finding["title"] == "the index idx_outbox_event_failed is missing"


@on_postgresql
def test_an_emitters_role_learns_all_that_it_lacks(clinic: Clinic, roles: dict[str, str]) -> None:
    connect_as(clinic, roles["emitter"])
    document = clinic.report()
    titles = [finding["title"] for finding in document["findings"]]
    assert titles == [f"{roles['emitter']} lacks rights that a relay needs"]
    assert {"destinations", "payloads", "relays"} <= {one["check"] for one in document["unseen"]}


@on_mariadb
def test_the_roles_of_mariadb_see_as_much_as_they_need(clinic: Clinic) -> None:
    roles, owner = named_roles(), clinic.url
    users = {role: f"user_{name}@'127.0.0.1'" for role, name in roles.items()}
    run_script(owner, ";".join(grants("mariadb", **roles)))
    for role, user in users.items():
        run_script(
            owner,
            f"CREATE USER {user} IDENTIFIED BY 'relaybox'; GRANT {roles[role]} TO {user};"
            f"SET DEFAULT ROLE {roles[role]} FOR {user}",
        )
    run_script(owner, f"REVOKE UPDATE ON outbox_event FROM {roles['relay']}")
    try:
        connect_as(clinic, f"user_{roles['viewer']}")
        document = clinic.report()
        assert document["findings"] == []
        assert {one["check"] for one in document["unseen"]} == {"privileges", "transactions"}
        clinic.url = owner
        connect_as(clinic, f"user_{roles['relay']}")
        finding = clinic.only_finding("lacks rights that a relay needs")
        assert finding["detail"] == "no UPDATE on outbox_event"
        run_script(owner, finding["fix"])
        document = clinic.report()
        assert document["findings"] == []
        assert {one["check"] for one in document["unseen"]} == {"transactions"}
    finally:
        run_script(owner, f"DROP USER {', '.join(users.values())}; DROP ROLE {', '.join(roles.values())}")


def test_the_grants_of_mariadb_are_read_as_it_writes_them() -> None:
    lines = [
        "GRANT USAGE ON *.* TO `u`@`%` IDENTIFIED BY PASSWORD '*X'",
        "GRANT `relaybox_relay` TO `u`@`%`",
        r"GRANT SELECT ON `shop\_%`.* TO `u`@`%`",
        "GRANT INSERT, UPDATE ON `shop_1`.`outbox_event` TO `relaybox_relay`",
        "GRANT DELETE ON `other`.`outbox_event` TO `relaybox_relay`",
    ]
    held = parse_grants(lines, "shop_1", ["outbox_event", "outbox_audit"])
    assert held == {"outbox_event": {"SELECT", "INSERT", "UPDATE"}, "outbox_audit": {"SELECT"}}
    [every] = parse_grants(["GRANT ALL PRIVILEGES ON *.* TO `u`@`%`"], "x", ["t"]).values()
    assert every == {"SELECT", "INSERT", "UPDATE", "DELETE"}


@pytest.mark.parametrize("clinic", ["postgresql-18", "postgresql-15"], indirect=True)
def test_a_transaction_that_keeps_rows_from_being_cleaned_up_is_found_and_ended(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(psycopg.connect(clinic.url)) as holder:
        holder.execute("CREATE TEMPORARY TABLE held ()")
        assert clinic.findings() == []
        monkeypatch.setattr(database, "OLD", 0.0)
        finding = clinic.repair("a transaction is open for")
        assert "idle in transaction" in finding["detail"]


def test_trouble_of_the_whole_server_is_found_and_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = postgres18.server(durable=True, own=["max_prepared_transactions=5"])
    with available("PostgreSQL 18", server) as url:
        clinic = Clinic(url, tmp_path)
        clinic.run("migrate")
        clinic.sql("ALTER SYSTEM SET autovacuum = off")
        clinic.sql("SELECT pg_reload_conf()")
        until(clinic, ["autovacuum is off on this server"])
        clinic.apply(clinic.only_finding("autovacuum")["fix"])
        until(clinic, [])
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("BEGIN")
            connection.execute("INSERT INTO outbox_destination (name) VALUES ('held')")
            connection.execute("PREPARE TRANSACTION 'it''s held'")
        monkeypatch.setattr(database, "OLD", 0.0)
        clinic.repair("the transaction 'it''s held' is prepared for")


def until(clinic: Clinic, titles: list[str]) -> None:
    """Look until a server has read its settings."""
    wait_for(lambda: [finding["title"] for finding in clinic.findings()] == titles, f"only {titles}")


@on_postgresql
def test_dead_rows_are_found_and_vacuumed(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic.emit()
    clinic.run("drain")
    for _ in range(5):
        clinic.change(error_message="x")
    assert clinic.findings() == []
    monkeypatch.setattr(database, "DEAD", 3)
    # A session that ends writes its statistics a moment later.
    wait_for(lambda: clinic.findings("--only", "vacuum"))
    clinic.repair("outbox_event has [0-9]+ dead rows", "--only", "vacuum")


@on_mariadb
def test_on_mariadb_an_old_transaction_is_ended(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = engine(clinic.url).connect()
    try:
        connection.exec_driver_sql("INSERT INTO outbox_destination (name) VALUES ('held')")
        monkeypatch.setattr(database, "OLD", -1.0)
        clinic.apply(clinic.only_finding("a transaction is open for")["fix"])
        # KILL returns before the server has rolled the transaction back.
        wait_for(lambda: not clinic.findings(), "the transaction ends")
    finally:
        connection.invalidate()
        connection.close()


@on_postgresql
def test_a_slot_that_nobody_reads_is_dropped(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"slot_{uuid4().hex[:8]}"
    clinic.sql(f"SELECT pg_create_physical_replication_slot('{name}', true)")
    try:
        assert clinic.findings() == []
        monkeypatch.setattr(database, "KEPT", 0)
        clinic.repair(f"nobody reads the replication slot {name}")
    finally:
        drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{}'"
        clinic.sql(drop.format(name))


@on_postgresql
def test_settings_of_the_database_for_transactions_are_reported_and_reset(clinic: Clinic) -> None:
    name = sa.make_url(clinic.url).database
    clinic.sql(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    finding = clinic.only_finding("transactions are serializable by default")
    assert finding["level"] == "info"
    clinic.apply(finding["fix"])
    clinic.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    finding = clinic.only_finding("transactions are read-only")
    with psycopg.connect(clinic.url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(finding["fix"].encode())
    assert clinic.findings() == []


@on_postgresql
def test_asynchronous_commits_of_a_database_or_a_role_are_reported_and_reset(clinic: Clinic) -> None:
    name, role = sa.make_url(clinic.url).database, f"role_{uuid4().hex}"
    clinic.sql(f"CREATE ROLE {role}")
    try:
        for whose in (f"DATABASE {name}", f"ROLE {role}", f"ROLE {role} IN DATABASE {name}"):
            clinic.sql(f"ALTER {whose} SET synchronous_commit = off")
            finding = clinic.repair("synchronous_commit is off for", "--only", "durability")
            assert finding["fix"] == f"ALTER {whose} RESET synchronous_commit;"
    finally:
        clinic.sql(f"DROP ROLE {role}")


@on_postgresql
def test_a_server_that_forgets_commits_is_reported_and_fixed(clinic: Clinic) -> None:
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        clinic.sql(f"ALTER SYSTEM SET {name} = off")
        clinic.sql("SELECT pg_reload_conf()")
        until(clinic, [f"{name} is off on this server"])
        finding = clinic.only_finding(name)
        assert finding["level"] == "warning"
        clinic.apply(finding["fix"])
        until(clinic, [])
        clinic.sql(f"ALTER SYSTEM RESET {name}")


async def test_a_binary_log_that_is_not_flushed_is_reported() -> None:
    async def findings(*settings: int) -> list[str]:
        async def ask(_: str) -> list[tuple[int, ...]]:
            return [settings]

        context: Any = SimpleNamespace(outbox=SimpleNamespace(dialect="mariadb"), ask=ask)
        return [finding.title async for finding in durability.run(context)]

    assert await findings(1, 0, 1) == ["sync_binlog is 0"]
    assert await findings(1, 0, 0) == [], "there is none"
    assert await findings(1, 1, 1) == []


@on_mariadb
def test_a_mariadb_that_forgets_commits_is_reported_and_fixed(clinic: Clinic) -> None:
    for value in (0, 2):
        clinic.sql(f"SET GLOBAL innodb_flush_log_at_trx_commit = {value}")
        clinic.repair(f"innodb_flush_log_at_trx_commit is {value}")


@pytest.mark.parametrize(
    ("dialect", "old", "new"),
    [
        ("postgresql", ["12.22 (Debian)"], ["13.1", "18.0"]),
        ("mariadb", ["5.5.5-10.5.9-MariaDB"], ["10.11.6-MariaDB", "12.0.2-MariaDB"]),
        ("mysql", ["5.7.44"], ["8.0.36"]),
        ("sqlite", ["3.34.1"], ["3.46.0"]),
    ],
)
def test_a_server_that_is_too_old_is_reported(dialect: str, old: list[str], new: list[str]) -> None:
    assert [finding and finding.level for finding in (outdated(dialect, one) for one in old)] == ["error"]
    assert not any(outdated(dialect, version) for version in new)


@on_each_kind
def test_events_for_no_destination_and_of_no_route_are_found_and_moved(clinic: Clinic) -> None:
    clinic.emit(destinations=["gone"])
    finding = clinic.only_finding("1 event waits for 'gone', which is not a destination")
    assert (finding["level"], finding["fix"]) == ("error", "relaybox move gone runner")
    clinic.apply(finding["fix"])
    clinic.run("drain")
    assert clinic.findings() == []
    clinic.emit("invoice.sent")
    finding = clinic.only_finding("1 event waits for a route")
    assert "invoice.sent" in finding["detail"]
    assert "Route('invoice.sent'" in finding["fix"]
    clinic.apply(finding["fix"].partition("or: ")[2])
    clinic.run("drain")
    assert clinic.findings() == []


@on_each_kind
def test_events_that_do_not_decode_are_found_and_discarded(clinic: Clinic) -> None:
    clinic.emit()
    clinic.change(payload=sa.null(), payload_data=b"?", payload_encoding="rot13")
    finding = clinic.only_finding("1 event for 'runner' cannot be decoded", "--skip", "relays")
    assert "rot13" in finding["detail"]
    clinic.apply(finding["fix"])
    assert clinic.findings() == []


@on_each_kind
def test_due_events_without_a_relay_are_found_and_delivered_by_one(clinic: Clinic) -> None:
    clinic.emit()
    assert clinic.only_finding("no relay runs, and 1 event is due")["level"] == "info"
    clinic.change(created_at=datetime.now(UTC) - timedelta(hours=1))
    finding = clinic.only_finding("no relay runs, and 1 event is due")
    assert (finding["level"], finding["fix"]) == ("error", "relaybox relay")
    clinic.apply(f"{finding['fix']} --once")
    assert clinic.findings() == []


@on_each_kind
def test_relays_with_different_settings_are_found(clinic: Clinic) -> None:
    clinic.run("prune")
    insert = "INSERT INTO outbox_setting (destination, relay, setting) VALUES ('runner', 'other', '{}')"
    setting = '{"retention": 86400, "ordered": true, "on_failed": "block"}'
    clinic.sql(insert.replace("{}", setting))
    finding = clinic.only_finding("relays have different settings for 'runner'")
    assert finding["level"] == "warning"
    assert "other has retention = '1d', ordered, on_failed = 'block'" in finding["detail"]
    assert "has retention = '7d', not ordered" in finding["detail"]
    clinic.sql("DELETE FROM outbox_setting WHERE relay = 'other'")
    assert clinic.findings() == []


@on_each_kind
def test_rows_that_nobody_prunes_because_nobody_knows_them_are_found(clinic: Clinic) -> None:
    clinic.emit()
    clinic.run("drain")
    clinic.sql("UPDATE outbox_event SET destination = 'elder'")
    finding = clinic.only_finding("what was delivered to 'elder' is kept for good")
    assert finding["level"] == "info"


@on_each_kind
def test_a_failed_event_that_holds_up_its_key_is_found_and_retried(clinic: Clinic) -> None:
    clinic.configure("ordered = true")
    clinic.emit()
    clinic.change(status="failed", next_attempt_at=None, attempts=5, error_message="422")
    clinic.emit()
    clinic.sql("UPDATE outbox_event SET next_attempt_at = NULL WHERE status = 'pending'")
    finding = clinic.only_finding("1 event failed for 'runner', and what is behind in the order waits")
    assert (finding["level"], finding["fix"]) == ("warning", "relaybox retry --destination runner")
    clinic.apply(finding["fix"])
    clinic.run("drain")
    clinic.run("drain")
    assert clinic.findings() == []


def test_a_pause_is_a_note_that_says_how_to_end_it(clinic: Clinic) -> None:
    clinic.run("pause", "runner", "--reason", "their maintenance")
    finding = clinic.repair("destination 'runner' is paused")
    assert finding["level"] == "info"
    assert "their maintenance" in finding["detail"]


def only_sink(clinic: Clinic, text: str) -> dict[str, str]:
    """Return what is wrong with the only sink of a configuration."""
    clinic.configure(text=text)
    [finding] = clinic.findings("--only", "sinks")
    return finding


@pytest.mark.parametrize(
    "sink",
    [
        "http://127.0.0.1:{port}/services/guest",
        "redis://127.0.0.1:{port}/0",
        "nats://127.0.0.1:{port}/events",
        "amqp://guest:guest@127.0.0.1:{port}/",
        "meilisearch://:guest@127.0.0.1:{port}/documents",
        "opensearch://guest:guest@127.0.0.1:{port}/documents",
        "algolia://:guest@APPLICATION/documents?host=127.0.0.1:{port}&tls=false",
    ],
)
def test_a_sink_that_does_not_answer_is_found(clinic: Clinic, sink: str) -> None:
    with socket.socket() as place:
        # No process listens there, and none can begin to.
        place.bind(("127.0.0.1", 0))
        url = sink.format(port=place.getsockname()[1])
        finding = only_sink(clinic, f'[destinations.dead]\nsink = "{url}"\nallow = ["127.0.0.0/8"]\n')
    assert (finding["level"], finding["title"]) == ("error", "destination 'dead' does not answer")
    assert "guest" not in json.dumps(finding)


def test_a_sink_that_refuses_is_not_said_to_be_silent(clinic: Clinic, meilisearch_url: str) -> None:
    url = re.sub(r"//:[^@]+@", "//:wrongkey@", meilisearch_url)
    finding = only_sink(clinic, f'[destinations.search]\nsink = "{url}/documents"\n')
    assert (finding["level"], finding["title"]) == ("error", "destination 'search' cannot be sent to")
    assert "403 Forbidden" in finding["detail"]
    assert "auth" in finding["fix"]
    assert "start it" not in finding["fix"]
    assert "wrongkey" not in json.dumps(finding)


def test_a_celery_broker_that_refuses_is_found(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        celery = Celery("shop", broker=f"redis://127.0.0.1:{place.getsockname()[1]}/0", set_as_current=False)
        current = SimpleNamespace(_get_current_object=lambda: celery)
        monkeypatch.setattr("relaybox.sinks.celery.current_app", current)
        finding = only_sink(clinic, '[destinations.work]\nsink = "celery:shop.tasks.index"\n')
    assert finding["title"] == "destination 'work' does not answer"
    assert "refused" in finding["detail"]


def test_a_silent_celery_broker_holds_up_no_exit(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Silent:
        main, conf = "shop", SimpleNamespace(task_always_eager=False, broker_url="amqp://nowhere")

        def connection_for_write(self) -> None:
            go_on.wait(60)
            raise OSError("gone")

    current = SimpleNamespace(_get_current_object=Silent)
    monkeypatch.setattr("relaybox.sinks.celery.current_app", current)
    silent = '[destinations.work]\nsink = "celery:shop.tasks.index"\ntimeout = "100ms"\n'
    try:
        finding = only_sink(clinic, silent)
    finally:
        go_on.set()
    assert (finding["title"], finding["detail"]) == (
        "destination 'work' does not answer",
        "celery:shop.tasks.index: no answer within 0.1 s",
    )


def test_a_webhook_that_answers_is_well_and_gets_nothing(clinic: Clinic) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/events"
        clinic.configure(text=f'[destinations.web]\nsink = "{url}"\nallow = ["127.0.0.0/8"]\n')
        assert clinic.findings("--only", "sinks") == []
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b""


def test_an_address_that_is_not_allowed_is_reported_with_the_setting(clinic: Clinic) -> None:
    assert "allow" in only_sink(clinic, '[destinations.web]\nsink = "http://127.0.0.1:9/events"\n')["fix"]


def test_a_secret_that_is_not_set_is_found_and_set(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic.configure('secret = "env:RUNNER_SECRET"')
    finding = clinic.only_finding("destination 'runner' cannot be sent to")
    assert finding["level"] == "error"
    assert "RUNNER_SECRET" in finding["detail"]
    assert finding["fix"] == "set the variable RUNNER_SECRET"
    monkeypatch.setenv("RUNNER_SECRET", "s3cret")
    assert clinic.findings() == []


def test_what_a_destination_exposes_is_found_and_put_right(clinic: Clinic) -> None:
    text = '[destinations.shop]\nsink = "{}://shop.example.org/events"\nsecret = "{}"\n{}'
    route = '[[routes]]\nevents = ["*"]\nto = ["shop"]\n'
    clinic.configure(text=text.format("http", "hush-" * 8, route))
    found = clinic.findings("--only", "settings")
    assert [(one["level"], one["title"]) for one in found] == [
        ("warning", "destination 'shop' is public and has no TLS"),
        ("warning", "secret of destination 'shop' is a secret in the settings"),
    ]
    assert "hush" not in str(found)
    clinic.configure(text=text.format("https", "env:SHOP_SECRET", route))
    assert clinic.findings("--only", "settings") == []


def test_a_function_that_cannot_be_imported_is_found(clinic: Clinic, tmp_path: Path) -> None:
    name = f"tasks_{uuid4().hex}"
    route = '[[routes]]\nevents = ["*"]\nto = ["work"]\n'
    clinic.configure(text=f'[destinations.work]\nsink = "handler:{name}:take"\n{route}')
    finding = clinic.only_finding("destination 'work' cannot be sent to")
    assert name in finding["detail"]
    (tmp_path / f"{name}.py").write_text("def take(event):\n    pass\n")
    assert clinic.findings() == []
    sys.modules.pop(name, None)


def test_a_secret_that_might_be_guessed_is_found_and_not_shown(clinic: Clinic) -> None:
    route = '[[routes]]\nevents = ["*"]\nto = ["runner"]\n'
    runner = 'sink = "http://127.0.0.1:1/"\nsecret = "hush"\nallow = ["127.0.0.0/8"]\n'
    clinic.configure(text=f"[destinations.runner]\n{runner}{route}")
    found = clinic.findings()
    [finding] = [one for one in found if one["title"] == "a setting of destination 'runner'"]
    assert "secret has a key of 4 bytes" in finding["detail"]
    assert finding["fix"] == "`relaybox secret new` prints one"
    assert "hush" not in str(found)


def test_settings_that_conflict_or_lack_a_route_or_cannot_be_read_are_reported(clinic: Clinic) -> None:
    clinic.configure('lease = "5s"\ntimeout = "30s"')
    finding = clinic.only_finding("a setting of destination 'runner'")
    assert finding["level"] == "warning"
    assert "lease" in finding["detail"]
    clinic.configure(text='[destinations.runner]\nsink = "console:"\n')
    assert clinic.only_finding("gets no events by itself")["level"] == "info"
    clinic.configure(text="")
    assert clinic.only_finding("no destinations are configured")["level"] == "error"
    clinic.configure('no_such_setting = "1"')
    assert "no_such_setting" in clinic.only_finding("the settings cannot be read")["detail"]


def test_a_database_without_its_variable_is_reported(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic.configure(more='database = "env:SHOP_DATABASE"')
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    [finding] = json.loads(done.stdout)["findings"]
    assert finding["fix"] == "set the variable SHOP_DATABASE"
    monkeypatch.setenv("SHOP_DATABASE", clinic.url)
    assert CliRunner().invoke(app, ["doctor"]).stdout == "nothing found (14 checks)\n"


@on_postgresql
def test_a_transaction_pooler_is_found_and_can_be_gone_round(clinic: Clinic, pgbouncer_url: str) -> None:
    direct, clinic.url = clinic.url, pgbouncer.through(pgbouncer_url, clinic.url)
    finding = clinic.only_finding("a transaction pooler stands before the database")
    assert finding["level"] == "warning"
    assert "notify = false" in finding["fix"]
    clinic.configure(more="notify = false")
    assert clinic.findings() == []
    clinic.configure()
    clinic.url = direct
    assert clinic.findings() == []


@on_each_kind
async def test_a_clock_that_is_wrong_is_found(clinic: Clinic) -> None:
    for ahead, level in ((60.0, ["warning"]), (-3600.0, ["error"]), (0.0, [])):
        shown = partial(lambda by: time.time() + by, ahead)
        report = await examine(clinic.outbox.settings, {}, only=["clock"], clock=shown)
        assert [finding.level for finding in report.findings] == level
        assert all("timedatectl" in finding.fix for finding in report.findings)


def test_a_database_that_is_down_is_reported_and_the_sinks_are_examined_all_the_same(clinic: Clinic) -> None:
    clinic.configure('secret = "env:RUNNER_SECRET"')
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        for scheme in ("postgresql", "mysql"):
            clinic.url = f"{scheme}://u:hunter2@127.0.0.1:{place.getsockname()[1]}/db"
            titles = [finding["title"] for finding in clinic.findings()]
            assert titles == ["destination 'runner' cannot be sent to", "the database cannot be reached"]
            assert "hunter2" not in clinic.run("doctor", status=1)


async def test_a_check_that_breaks_hides_no_other(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic.sql("DROP INDEX idx_outbox_event_failed")

    async def breaks(context: Context) -> Results:
        yield Finding("info", "a title", "seen before it broke", "a fix")
        raise ZeroDivisionError("of a check")

    async def hangs(context: Context) -> Results:
        await asyncio.sleep(3600)
        yield Finding("info", "a title", "never", "a fix")

    module: Any = sys.modules["relaybox.operate.doctor"]
    changed = {"database": breaks, "isolation": hangs}
    checks = [replace(one, run=changed.get(one.name, one.run)) for one in module.CHECKS]
    monkeypatch.setattr(module, "CHECKS", tuple(checks))
    monkeypatch.setattr(module, "CHECK_SECONDS", 2.0)
    report = await examine(clinic.outbox.settings, {}, skip=["settings"])
    assert [(one.check, one.reason) for one in report.unseen] == [
        ("database", "ZeroDivisionError: of a check"),
        ("isolation", "no answer within 2 s"),
    ]
    titles = {finding.title for finding in report.findings}
    assert titles == {"a title", "the index idx_outbox_event_failed is missing"}


def test_checks_are_chosen_by_their_names(clinic: Clinic) -> None:
    assert clinic.report("--only", "schema", "--only", "clock")["checks"] == ["schema", "clock"]
    assert "sinks" not in clinic.report("--skip", "sinks")["checks"]
    assert "did you mean 'schema'" in clinic.run("doctor", "--only", "shema", status=2)
    assert "no check is called 'nonsense'" in clinic.run("doctor", "--skip", "nonsense", status=2)


def test_the_checks_are_made_in_the_order_in_which_the_documents_list_them(clinic: Clinic) -> None:
    names = [check.name for check in CHECKS]
    page = (Path(__file__).parents[2] / "docs/how-to/doctor.md").read_text()
    table = page.partition("## The checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == names
    listed = " ".join(clinic.run("doctor", "--help").replace("│", " ").split())
    assert ", ".join(names) in listed


def test_findings_are_printed_for_people(clinic: Clinic) -> None:
    clinic.sql("DROP INDEX idx_outbox_event_failed")
    clinic.emit()
    lines = clinic.run("doctor", status=1).splitlines()
    assert lines[0] == "error    the index idx_outbox_event_failed is missing (schema)"
    assert lines[2].startswith("         fix: CREATE INDEX idx_outbox_event_failed ON outbox_event")
    assert "info     no relay runs, and 1 event is due (relays)" in lines
    assert lines[-1] == "1 error, 1 note (14 checks)"
    clinic.run("pause", "runner", "--reason", "\x1b[2Jgone")
    text = clinic.run("doctor", status=1)
    assert "gone" in text
    assert "\x1b" not in text, "text of others moves no cursor"
