"""Each role may do its work, with the statements that do it, and nothing else."""

# The names in the statements are the tests' own.
# ruff: noqa: S608

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox import Inbox
from relaybox.core.clock import MonotonicClock
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.database.dialects import DIALECTS
from relaybox.database.migrations import DialectName, check, migrate
from relaybox.database.roles import grants
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import Query, Statements
from relaybox.errors import ConfigError, SchemaError, StoreError
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.prune import Prune
from relaybox.stores.journal import Audit
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.sql.upkeep.sample import SqlSamples
from relaybox.stores.store import Settlement, Want
from relaybox.stores.upkeep import Sample
from tests.conftest import available
from tests.databases import POSTGRESQL, engine
from tests.integration.upkeep.bench import go_on
from tests.schema_snapshot import run_script
from tests.servers import fresh, mariadb
from tests.web.stage import HTML, Stage, log_in

ROLES = ("emitter", "relay", "viewer", "consumer")
DENIED = "permission denied|must be owner|command denied"
GRANTOR = "GRANT ALL PRIVILEGES ON *.* TO relaybox@'127.0.0.1' WITH GRANT OPTION;\n"

Denied = (sa.exc.ProgrammingError, sa.exc.OperationalError)


@dataclass(frozen=True)
class Database:
    """A migrated database with a login for each role."""

    url: str
    dialect: DialectName
    schema: str | None
    logins: dict[str, str]
    roles: dict[str, str]

    @property
    def tables(self) -> Tables:
        return make_tables(sa.MetaData(), schema=self.schema)

    @property
    def statements(self) -> Statements:
        return Statements(self.tables, DIALECTS[self.dialect], "format")

    def execute(self, login: str, *queries: Query | str) -> list[Any]:
        """Run the queries as this login in one transaction; the rows of the last."""
        with engine(self.logins[login]).begin() as connection:
            for query in queries:
                sql, params = (query, ()) if isinstance(query, str) else query
                result = connection.exec_driver_sql(sql, params)
            return list(result.all()) if result.returns_rows else []

    def denies(self, login: str, query: Query | str) -> None:
        with pytest.raises(Denied, match=DENIED):
            self.execute(login, query)

    def name(self, table: str) -> str:
        return ".".join(part for part in (self.schema, table) if part)

    def all_tables(self) -> list[str]:
        return [self.name(getattr(self.tables, field.name).name) for field in fields(Tables)]

    def emit(self, key: str) -> None:
        """Send what an application sends: the key, the key again, the row."""
        to_uuid, words = DIALECTS[self.dialect].to_uuid, {"event_type": "order.paid", "key": key}
        remember = self.statements("remember_key", **words, event_id=to_uuid(uuid4()))
        again = self.statements("remember_key", **words, event_id=to_uuid(uuid4()))
        recall = self.statements("recall_key", **words)
        row = (to_uuid(uuid4()), to_uuid(uuid4()), "d", "Order", "1", "order.paid", "{}", None, None)
        insert = self.statements.insert([(*row, "{}", f"key of {key}", key, 5, None)])
        self.execute("emitter", remember, again, recall, insert)


@pytest.fixture(scope="module")
def granting_mariadb() -> Iterator[str]:
    """Run a server whose account may grant: roles belong to the server, not to a database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mariadb, "ACCOUNT", mariadb.ACCOUNT + GRANTOR)
        with available("MariaDB", mariadb.server()) as url:
            yield url


@pytest.fixture(params=[*POSTGRESQL, "postgresql-18 in a schema", "mariadb"])
def database(request: pytest.FixtureRequest, fresh_database: Callable[[str], str]) -> Iterator[Database]:
    if request.param == "mariadb":
        with fresh.database(request.getfixturevalue("granting_mariadb")) as url:
            migrate(url)
            yield on_mariadb(url)
        return
    kind, _, in_schema = request.param.partition(" ")
    with on_postgresql(fresh_database(kind), "ours" if in_schema else None) as found:
        yield found


@contextmanager
def on_postgresql(url: str, schema: str | None) -> Iterator[Database]:
    mark = uuid4().hex[:8]
    roles = {role: f"{role}_{mark}" for role in ROLES}
    logins = {role: f"login_{name}" for role, name in roles.items()}
    migrate(url, schema=schema)
    run_script(url, ";".join(grants("postgresql", schema=schema, **roles)))
    run_script(url, ";".join(f"CREATE ROLE {logins[role]} LOGIN IN ROLE {roles[role]}" for role in ROLES))
    try:
        urls = {role: as_user(url, login) for role, login in logins.items()}
        yield Database(url, "postgresql", schema, urls, roles)
    finally:
        everyone = ", ".join([*roles.values(), *logins.values()])
        run_script(url, f"DROP OWNED BY {everyone}; DROP ROLE {everyone}")


def on_mariadb(url: str) -> Database:
    run_script(url, ";".join(grants("mariadb")))
    roles = {role: f"relaybox_{role}" for role in ROLES}
    logins = {role: f"{role}_{uuid4().hex[:8]}" for role in ROLES}
    for role, login in logins.items():
        user = f"{login}@'127.0.0.1'"
        run_script(
            url,
            f"CREATE USER {user} IDENTIFIED BY 'relaybox'; GRANT {roles[role]} TO {user};"
            f"SET DEFAULT ROLE {roles[role]} FOR {user}",
        )
    urls = {role: as_user(url, login) for role, login in logins.items()}
    return Database(url, "mariadb", None, urls, roles)


def as_user(url: str, name: str) -> str:
    return sa.make_url(url).set(username=name).render_as_string(hide_password=False)


def test_the_emitter_writes_events_and_keys_and_sees_whether_the_tables_are_there(database: Database) -> None:
    database.emit("1")
    database.emit("2")
    with engine(database.url).connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(database.tables.event)) == 2
        assert connection.scalar(sa.select(sa.func.count()).select_from(database.tables.idempotency)) == 2
    check(database.logins["emitter"], schema=database.schema)


def test_the_emitter_may_not_read_change_or_delete_events(database: Database) -> None:
    database.emit("1")
    event, key = database.name("outbox_event"), database.name("outbox_idempotency")
    for statement in (
        f"SELECT id FROM {event}",
        f"UPDATE {event} SET status = 'failed'",
        f"DELETE FROM {event}",
        f"INSERT INTO {event} (status) VALUES ('delivered')",
        f"INSERT INTO {event} (leased_until) VALUES (NULL)",
        f"INSERT INTO {event} (delivered_at) VALUES (NULL)",
        f"INSERT INTO {event} (error_message) VALUES ('x')",
        f"TRUNCATE TABLE {event}",
        f"UPDATE {key} SET created_at = created_at",
        f"DELETE FROM {key}",
        f"SELECT 1 FROM {database.name('outbox_audit')}",
        f"INSERT INTO {database.name('outbox_destination')} (name) VALUES ('d')",
        f"INSERT INTO {database.name('outbox_migration')} (version) VALUES (2)",
        f"DROP TABLE {event}",
    ):
        database.denies("emitter", statement)


def test_only_for_debezium_the_emitter_writes_final_rows_and_still_no_lease(database: Database) -> None:
    if database.dialect != "postgresql":
        pytest.skip("Debezium reads PostgreSQL's log")
    row = (uuid4(), uuid4(), "d", "Order", "1", "order.paid", "{}", None, None, "{}", None, "1", 5, None)
    final = database.statements.insert([row], final=True)
    database.denies("emitter", final)
    wider = grants("postgresql", schema=database.schema, **database.roles, handed_over=True)
    run_script(database.url, ";".join(wider))
    database.execute("emitter", final)
    database.denies("emitter", f"INSERT INTO {database.name('outbox_event')} (leased_until) VALUES (NULL)")
    run_script(database.url, ";".join(grants("postgresql", schema=database.schema, **database.roles)))
    database.denies("emitter", final)


@pytest.mark.parametrize("role", ["emitter", "consumer"])
def test_a_role_has_no_right_that_it_does_not_need(role: str, database: Database) -> None:
    work, name, needed = (
        {"emitter": work_as_emitter, "consumer": work_as_consumer}[role],
        database.roles[role],
        0,
    )
    for grant in grants(database.dialect, schema=database.schema, **database.roles):
        for privilege, rest in single_privileges(grant, name):
            needed += 1
            run_script(database.url, f"REVOKE {privilege} {rest.replace(' TO ', ' FROM ')}")
            # MariaDB hides a table from those who may do nothing with it.
            with pytest.raises((*Denied, StoreError, SchemaError), match=f"{DENIED}|tables are missing"):
                work(database)
            run_script(database.url, grant)
            work(database)
    assert needed > 3


def work_as_emitter(database: Database) -> None:
    database.emit(uuid4().hex)
    check(database.logins["emitter"], schema=database.schema)


def work_as_consumer(database: Database) -> None:
    inbox, message = Inbox(consumer="billing", window="1s", schema=database.schema), uuid4()
    login, marks = engine(database.logins["consumer"]), database.name("inbox_message")
    with login.begin() as connection:
        assert inbox.mark(connection, message)
        assert not inbox.mark(connection, message)
    run_script(database.url, f"UPDATE {marks} SET processed_at = '2020-01-01 00:00:00'")
    with login.begin() as connection:
        assert inbox.prune(connection)


def single_privileges(grant: str, role: str) -> Iterator[tuple[str, str]]:
    """Return the privileges of a GRANT to this role, one by one, each with what follows them."""
    match = re.fullmatch(rf"GRANT (.*?) (ON .* TO [`\"]{role}[`\"])", grant)
    for privilege in re.findall(r"[A-Z]+(?: \([^)]*\))?", match[1]) if match else ():
        yield privilege, str(match and match[2])


async def test_the_relay_samples_operates_claims_and_settles(database: Database) -> None:
    for key in "123":
        database.emit(key)
    store = open_store(database.logins["relay"], database.tables)
    assert isinstance(store, SqlStore)
    try:
        samples, ledger = SqlSamples(store), SqlLedger(store)
        assert (await samples.measure("d", 10)).pending == 3
        position, now = await samples.position()
        assert position == 3
        term = await SqlUpkeep(store).members.lead("a relay", 60.0)
        assert term is not None
        assert await samples.keep(term, now, [Sample("d", 3, 0, None)]) == 1
        id_ = uuid4()
        await ledger.journal.begin(id_, "retry", "ann", {}, None)
        assert await ledger.journal.cancel(id_)
        claim = await store.claim(Want("d", "a relay", ordered=True))
        assert len(claim.deliveries) == 3
        assert await store.extend(claim.deliveries, 60) == frozenset()
        outcomes = (Delivered(), Retried(0, "again"), Failed("never"))
        settlements = [Settlement(*pair) for pair in zip(claim.deliveries, outcomes, strict=True)]
        assert await store.settle(settlements) == frozenset()
        claim = await store.claim(Want("d", "a relay"))
        assert await store.settle([Settlement(claim.deliveries[0], Delivered(keep=False))]) == frozenset()
    finally:
        await store.close()
    check(database.logins["relay"], schema=database.schema)


def test_the_relay_may_not_change_the_schema_or_its_version(database: Database) -> None:
    migration = database.name("outbox_migration")
    for statement in (
        f"INSERT INTO {migration} (version) VALUES (2)",
        f"DELETE FROM {migration}",
        f"DROP TABLE {migration}",
        f"TRUNCATE TABLE {database.name('outbox_event')}",
        f"ALTER TABLE {database.name('outbox_event')} ADD COLUMN more INTEGER",
        f"CREATE TABLE {database.name('more')} (id INTEGER)",
    ):
        database.denies("relay", statement)


async def test_the_relay_only_adds_to_the_audit_and_prunes_all_but_it(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    audit, long_ago = database.name("outbox_audit"), "'2020-01-01 00:00:00'"
    run_script(
        database.url,
        f"INSERT INTO {audit} (actor, action, details, at) VALUES ('a', 'b', '{{}}', {long_ago})",
    )
    run_script(database.url, f"INSERT INTO {database.name('inbox_message')} VALUES ('c', 'm', {long_ago})")
    for statement in (f"UPDATE {audit} SET actor = 'eve'", f"DELETE FROM {audit}", f"TRUNCATE TABLE {audit}"):
        database.denies("relay", statement)
    store = open_store(database.logins["relay"], database.tables)
    assert isinstance(store, SqlStore)
    try:
        upkeep = SqlUpkeep(store)
        await SqlLedger(store).journal.note(Audit("ann", "login", {}))
        term = await upkeep.members.lead("a relay", 60.0)
        assert term is not None
        prune = Prune(upkeep.prune, Agreement(upkeep.reports, (), "me"), MonotonicClock(), go_on)
        caplog.set_level("INFO", "relaybox")
        rounds = [await prune(term) for _ in range(3)]
    finally:
        await store.close()
    assert [(one.changed, one.done, one.led) for one in rounds] == [(1, True, True), *[(0, True, True)] * 2]
    assert caplog.text.count("the audit is kept: this relay's role may not delete from it") == 1
    assert len(database.execute("viewer", f"SELECT * FROM {audit}")) == 2


def test_a_consumer_marks_and_prunes_messages_and_sees_nothing_else(database: Database) -> None:
    work_as_consumer(database)
    for table in database.all_tables():
        if not table.endswith("inbox_message"):
            database.denies("consumer", f"SELECT count(*) FROM {table}")
    database.denies("consumer", f"DROP TABLE {database.name('inbox_message')}")


def test_rights_that_earlier_releases_gave_are_taken_back(database: Database) -> None:
    if database.dialect != "postgresql":
        pytest.skip("MariaDB cannot revoke what may not be granted")
    event, audit = database.name("outbox_event"), database.name("outbox_audit")
    run_script(database.url, f"GRANT INSERT ON {event} TO {database.roles['emitter']}")
    run_script(database.url, f"GRANT UPDATE, DELETE ON {audit} TO {database.roles['relay']}")
    run_script(database.url, ";".join(grants("postgresql", schema=database.schema, **database.roles)))
    database.denies("emitter", f"INSERT INTO {event} (status) VALUES ('delivered')")
    database.denies("relay", f"DELETE FROM {audit}")


async def test_a_user_logs_in_to_a_dashboard_that_may_only_read(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    if database.schema is not None:
        pytest.skip("the stage has its tables in no schema")
    async with Stage(database.logins["viewer"]) as stage, stage.client(None) as client:
        entered = await log_in(client)
        assert (entered.status_code, entered.headers["location"]) == (303, "/events")
        assert (await client.get("/events", headers=HTML)).status_code == 200
    assert "this login is not in the audit: the database's role may not write it" in caplog.text


def test_the_viewer_reads_everything_and_changes_nothing(database: Database) -> None:
    database.emit("1")
    assert len(database.execute("viewer", f"SELECT * FROM {database.name('outbox_event')}")) == 1
    tables = database.all_tables()
    assert len(tables) == 13
    for table in tables:
        database.execute("viewer", f"SELECT count(*) FROM {table}")
        database.denies("viewer", f"DELETE FROM {table}")
    database.denies("viewer", f"UPDATE {database.name('outbox_event')} SET attempts = 0")
    database.denies("viewer", f"INSERT INTO {database.name('outbox_destination')} (name) VALUES ('d')")


def test_the_statements_may_be_repeated(database: Database) -> None:
    script = ";".join(grants(database.dialect, schema=database.schema, **database.roles))
    run_script(database.url, script)
    run_script(database.url, script)
    work_as_emitter(database)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb", "sqlite"])
@pytest.mark.parametrize("setting", ["schema", "prefix", *ROLES])
def test_an_invalid_name_is_refused(dialect: Any, setting: str) -> None:
    arguments: dict[str, Any] = {setting: 'a"; drop table x;--'}
    with pytest.raises(ConfigError, match=rf"{setting} = 'a\"; drop table x;--'"):
        grants(dialect, **arguments)
