"""The tables for every database, as SQLAlchemy Core objects.

``info["ddl"]`` of a column holds one database's own specification, or ``None`` if it lacks the column. The
constraints allow only these states of a delivery:

    leased       pending, leased_until in the future
    due          pending, not leased, next_attempt_at in the past
    scheduled    pending, not leased, next_attempt_at in the future
    parked       pending, not leased, next_attempt_at null: waits for an earlier event of its key
    final        delivered, failed or discarded: no lease, no next attempt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn
from sqlalchemy.sql.expression import ColumnElement

from relaybox.core.values import identifier, wrong
from relaybox.database.positions import count_positions

MYSQL = ("mysql", "mariadb")
NOT_MYSQL = ("postgresql", "sqlite")

LONGEST_PREFIX = 25
"""Longer prefixes make PostgreSQL truncate index names."""

VERSION = 3
"""The version that ``outbox_migration`` records. Later tables name theirs in ``info["version"]``."""


class now(ColumnElement[Any]):
    """The database's current time: neither the transaction's start nor the caller's clock."""

    type = sa.DateTime(timezone=True)
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: Any, **_: Any) -> str:
    return "clock_timestamp()"


@compiles(now, *MYSQL)
def _now_mysql(element: now, compiler: Any, **_: Any) -> str:
    return "(UTC_TIMESTAMP(6))"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **_: Any) -> str:
    text = "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"
    # Drivers of this style treat every percent sign as a placeholder.
    return text.replace("%", "%%") if compiler.dialect.paramstyle == "format" else text


@compiles(CreateColumn)
def _create_column(element: Any, compiler: Any, **kw: Any) -> str | None:
    own = element.element.info.get("ddl", {})
    if compiler.dialect.name not in own:
        return str(compiler.visit_create_column(element, **kw))
    spec = own[server(compiler.dialect)]
    return spec and f"{compiler.preparer.format_column(element.element)} {spec}"


def server(dialect: sa.Dialect) -> str:
    """Return the dialect's name: ``mariadb`` even if the URL says ``mysql``."""
    return "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name


class _MysqlText(mysql.VARCHAR):
    """Text whose collation depends on the server, not on the URL."""


@compiles(_MysqlText, *MYSQL)
def _text_mysql(element: _MysqlText, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({element.length}) CHARACTER SET utf8mb4 COLLATE {COLLATIONS[server(compiler.dialect)]}"


COLLATIONS = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}


def _text(length: int) -> sa.types.TypeEngine[str]:
    """Return a type that compares byte by byte, trailing blanks included."""
    return (
        sa.String(length)
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
        .with_variant(_MysqlText(length), *MYSQL)
    )


class _MysqlUuid(sa.Uuid[Any]):
    """A UUID as 32 hexadecimal digits: MariaDB's own type sorts differently."""


@compiles(_MysqlUuid, *MYSQL)
def _uuid_mysql(element: _MysqlUuid, compiler: Any, **_: Any) -> str:
    return "CHAR(32) CHARACTER SET ascii COLLATE ascii_bin"


UUID = sa.Uuid().with_variant(_MysqlUuid(native_uuid=False), *MYSQL)
TIME = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *MYSQL)


class _Json(sa.JSON):
    """JSON, stored as TEXT on SQLite: a JSON column there turns numeric text into a number."""


@compiles(_Json, "sqlite")
def _json_sqlite(element: _Json, compiler: Any, **_: Any) -> str:
    return "TEXT"


JSON = _Json().with_variant(postgresql.JSONB(), "postgresql")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL)
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


@dataclass(frozen=True, slots=True)
class Tables:
    """Every table of one outbox, in the order of ``make_tables``."""

    event: sa.Table
    idempotency: sa.Table
    attempt: sa.Table
    destination: sa.Table
    relay: sa.Table
    leader: sa.Table
    audit: sa.Table
    stats: sa.Table
    inbox: sa.Table
    sample: sa.Table
    operation: sa.Table
    setting: sa.Table
    migration: sa.Table


def make_tables(metadata: sa.MetaData, *, schema: str | None = None, prefix: str = "") -> Tables:
    """Add the tables to ``metadata``; ``prefix`` precedes every name (``outbox_event``, …)."""
    for setting, name in (("schema", schema), ("prefix", prefix)):
        if name:
            identifier(name, setting)
    if len(prefix) > LONGEST_PREFIX:
        fix = f"use up to {LONGEST_PREFIX} characters: the names of indexes begin with it too"
        raise wrong("prefix", prefix, fix)
    names = _Names(metadata, schema, prefix)
    # First, because MySQL's DDL is not transactional: this table marks the others as ours.
    migration = _migration(names)
    makers = (
        *(_event, _idempotency, _attempt, _destination, _relay, _leader),
        *(_audit, _stats, _inbox, _sample, _operation, _setting),
    )
    made = [*(make(names) for make in makers), migration]
    tables = Tables(*made)
    _record_versions(metadata, tables)
    return tables


@dataclass(frozen=True, slots=True)
class _Names:
    metadata: sa.MetaData
    schema: str | None
    prefix: str

    def table(self, name: str, *columns: Any, **options: Any) -> sa.Table:
        table = sa.Table(f"{self.prefix}{name}", self.metadata, *columns, schema=self.schema, **options)
        for engine in MYSQL:
            table.dialect_options[engine]["engine"] = "InnoDB"
            table.dialect_options[engine]["default_charset"] = "utf8mb4"
        return table

    def check(self, name: str, condition: str) -> sa.CheckConstraint:
        return sa.CheckConstraint(condition, name=f"{self.prefix}{name}")

    def index(self, name: str, *columns: Any, where: str | None = None) -> sa.Index:
        """Return an index; with ``where`` a partial one, which MySQL does not have."""
        if where is None:
            return sa.Index(f"idx_{self.prefix}{name}", *columns)
        condition = sa.text(where)
        options: dict[str, Any] = {"postgresql_where": condition, "sqlite_where": condition}
        index = sa.Index(f"idx_{self.prefix}{name}", *columns, **options)
        return index.ddl_if(NOT_MYSQL)  # type: ignore[arg-type]

    def mysql_index(self, name: str, *columns: Any) -> sa.Index:
        return sa.Index(f"idx_{self.prefix}{name}", *columns).ddl_if(MYSQL)  # type: ignore[arg-type]


def _column(name: str, type_: Any, *args: Any, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, type_, *args, nullable=options.pop("nullable", False), **options)


def _number(name: str, default: int | None = None) -> sa.Column[Any]:
    return _column(name, sa.Integer, server_default=None if default is None else sa.text(str(default)))


def _moment(name: str, *, default: bool = True) -> sa.Column[Any]:
    return _column(name, TIME, server_default=now() if default else None, nullable=not default)


def _open_only(name: str, statuses: str) -> sa.Column[Any]:
    """Return MySQL's substitute for a partial index: the destination while the row is open, else null."""
    column = (
        "VARCHAR(100) CHARACTER SET utf8mb4 COLLATE {} "
        f"AS (IF(status IN ({statuses}), destination, NULL)) STORED"
    )
    specs = {name: column.format(collation) for name, collation in COLLATIONS.items()}
    return _column(name, _text(100), nullable=True, info={"ddl": dict.fromkeys(NOT_MYSQL) | specs})


def _event(names: _Names) -> sa.Table:
    event = names.table(
        "outbox_event",
        *_event_columns(),
        *_event_checks(names),
        *_event_indexes(names),
        # Half of each page stays free, so that a claim is a HOT update: it changes no indexed column.
        postgresql_with={
            "fillfactor": 50,
            "autovacuum_vacuum_scale_factor": 0.02,
            "autovacuum_vacuum_threshold": 1000,
            "autovacuum_analyze_scale_factor": 0.02,
            "autovacuum_analyze_threshold": 1000,
            "autovacuum_vacuum_cost_delay": 0,
        },
    )
    count_positions(event, prefix=names.prefix)
    return event


def _event_columns() -> list[sa.Column[Any]]:
    pending, failed = "'pending'", "'failed'"
    return [
        _column("id", UUID, primary_key=True),
        _column("event_id", UUID),
        _column("destination", _text(100)),
        _column("aggregate_type", _text(100)),
        _column("aggregate_id", _text(255)),
        _column("event_type", _text(100)),
        _column("payload", JSON, nullable=True),
        _column("payload_data", BYTES, nullable=True),
        _column("payload_encoding", _text(50), nullable=True),
        _column("headers", JSON),
        _column("ordering_key", _text(255), nullable=True),
        _column(
            "position",
            NUMBER,
            sa.Identity(always=True, cache=1),
            info={
                "ddl": {
                    **dict.fromkeys(MYSQL, "BIGINT NOT NULL AUTO_INCREMENT UNIQUE"),
                    "sqlite": "BIGINT NOT NULL DEFAULT 0",
                }
            },
        ),
        _column("status", _text(20), server_default="pending"),
        _column("idempotency_key", _text(255)),
        _number("attempts", 0),
        _number("max_attempts", 5),
        _number("crashes", 0),
        _column("next_attempt_at", TIME, server_default=now(), nullable=True),
        _moment("leased_until", default=False),
        _column("lease_token", UUID, nullable=True),
        _column("lease_owner", _text(200), nullable=True),
        _moment("created_at"),
        _moment("updated_at"),
        _moment("last_attempt_at", default=False),
        _moment("delivered_at", default=False),
        _column("error_message", sa.Text, nullable=True),
        _open_only("due_destination", pending),
        _open_only("head_destination", f"{pending}, {failed}"),
        _open_only("failed_destination", failed),
    ]


def _event_checks(names: _Names) -> list[sa.CheckConstraint]:
    return [
        names.check("outbox_event_status", "status IN ('pending', 'delivered', 'failed', 'discarded')"),
        names.check(
            "outbox_event_lease",
            "(leased_until IS NULL) = (lease_token IS NULL) "
            "AND (lease_token IS NULL) = (lease_owner IS NULL)",
        ),
        names.check(
            "outbox_event_final", "status = 'pending' OR (next_attempt_at IS NULL AND leased_until IS NULL)"
        ),
        names.check(
            "outbox_event_parked",
            "status <> 'pending' OR next_attempt_at IS NOT NULL OR ordering_key IS NOT NULL",
        ),
        names.check("outbox_event_delivered", "(status = 'delivered') = (delivered_at IS NOT NULL)"),
        names.check(
            "outbox_event_payload",
            "(payload IS NULL) <> (payload_data IS NULL) "
            "AND (payload_data IS NULL) = (payload_encoding IS NULL)",
        ),
        names.check("outbox_event_counts", "attempts >= 0 AND max_attempts >= 1 AND crashes >= 0"),
    ]


def _event_indexes(names: _Names) -> list[sa.Index]:
    return [
        names.index(
            "outbox_event_pending_next_attempt",
            "destination",
            "next_attempt_at",
            "position",
            where="status = 'pending'",
        ),
        names.index(
            "outbox_event_key_head",
            "destination",
            "ordering_key",
            "position",
            where="status IN ('pending', 'failed') AND ordering_key IS NOT NULL",
        ),
        names.index("outbox_event_delivered", "destination", "delivered_at", where="status = 'delivered'"),
        names.index("outbox_event_failed", "destination", "position", where="status = 'failed'"),
        names.index("outbox_event_aggregate", "aggregate_type", "aggregate_id"),
        names.mysql_index("outbox_event_due", "due_destination", "next_attempt_at", "position"),
        names.mysql_index("outbox_event_head", "head_destination", "ordering_key", "position"),
        names.mysql_index("outbox_event_kept", "destination", "delivered_at"),
        names.mysql_index("outbox_event_dead", "failed_destination", "position"),
    ]


def _idempotency(names: _Names) -> sa.Table:
    return names.table(
        "outbox_idempotency",
        _column("event_type", _text(100), primary_key=True),
        _column("idempotency_key", _text(255), primary_key=True),
        _column("event_id", UUID),
        _moment("created_at"),
        names.index("outbox_idempotency_created", "created_at"),
    )


def _attempt(names: _Names) -> sa.Table:
    return names.table(
        "outbox_attempt",
        _column("delivery_id", UUID, primary_key=True),
        _column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        _moment("failed_at"),
        _column("relay", _text(200)),
        _column("error_message", sa.Text),
    )


def _destination(names: _Names) -> sa.Table:
    return names.table(
        "outbox_destination",
        _column("name", _text(100), primary_key=True),
        _moment("paused_at", default=False),
        _moment("paused_until", default=False),
        _column("paused_by", _text(200), nullable=True),
        _column("pause_reason", sa.Text, nullable=True),
        _column("circuit", _text(20), server_default="closed"),
        _moment("circuit_until", default=False),
        _column("circuit_reason", sa.Text, nullable=True),
        _moment("rate_at", default=False),
        _moment("updated_at"),
        names.check("outbox_destination_circuit", "circuit IN ('closed', 'open', 'half_open')"),
    )


def _relay(names: _Names) -> sa.Table:
    return names.table(
        "outbox_relay",
        _column("name", _text(200), primary_key=True),
        _column("host", _text(255)),
        _number("pid"),
        _column("version", _text(50)),
        _moment("started_at"),
        _moment("seen_at"),
        _column("term", sa.BigInteger, nullable=True),
        _moment("leads_until", default=False),
    )


def _leader(names: _Names) -> sa.Table:
    """Apart from the relays: the row outlives them, so that no term is issued twice."""
    return names.table(
        "outbox_leader",
        _column("name", _text(50), primary_key=True),
        _column("relay", _text(200)),
        _column("term", sa.BigInteger),
        _moment("leads_until"),
    )


def _audit(names: _Names) -> sa.Table:
    return names.table(
        "outbox_audit",
        _column("id", NUMBER, sa.Identity(always=True), primary_key=True),
        _moment("at"),
        _column("actor", _text(200)),
        _column("action", _text(50)),
        _column("details", JSON),
        _number("affected", 0),
        names.index("outbox_audit_at", "at"),
    )


def _stats(names: _Names) -> sa.Table:
    return names.table(
        "outbox_stats",
        _column("minute", TIME, primary_key=True),
        _column("destination", _text(100), primary_key=True),
        _column("relay", _text(200), primary_key=True),
        _number("delivered", 0),
        _number("retried", 0),
        _number("failed", 0),
        _column("lag", JSON),
    )


def _inbox(names: _Names) -> sa.Table:
    return names.table(
        "inbox_message",
        _column("consumer", _text(100), primary_key=True),
        _column("message_id", _text(255), primary_key=True),
        _moment("processed_at"),
        names.index("inbox_message_processed", "processed_at"),
    )


def _sample(names: _Names) -> sa.Table:
    """Backlog per minute for the charts; the destination '' holds the total."""
    return names.table(
        "outbox_sample",
        _column("minute", TIME, primary_key=True),
        _column("destination", _text(100), primary_key=True),
        _number("pending", 0),
        _number("failed", 0),
        _column("oldest_seconds", sa.Double, nullable=True),
        _column("position", sa.BigInteger, nullable=True),
        info={"version": 2},
    )


def _operation(names: _Names) -> sa.Table:
    return names.table(
        "outbox_operation",
        _column("id", UUID, primary_key=True),
        _column("action", _text(50)),
        _column("actor", _text(200)),
        _column("details", JSON),
        _column("state", _text(20), server_default="running"),
        _column("total", sa.Integer, nullable=True),
        _number("capped", 0),
        _number("done", 0),
        _number("skipped", 0),
        _moment("started_at"),
        _moment("updated_at"),
        _moment("finished_at", default=False),
        _column("error", sa.Text, nullable=True),
        names.check("outbox_operation_state", "state IN ('running', 'done', 'cancelled', 'failed')"),
        info={"version": 2},
    )


def _setting(names: _Names) -> sa.Table:
    """Settings of destinations as relays report them; other processes may have different ones."""
    return names.table(
        "outbox_setting",
        _column("destination", _text(100), primary_key=True),
        _column("relay", _text(200), primary_key=True),
        _column("setting", JSON),
        _moment("said_at"),
        info={"version": 3},
    )


def _migration(names: _Names) -> sa.Table:
    return names.table(
        "outbox_migration",
        _column("version", sa.Integer, primary_key=True, autoincrement=False),
        _moment("applied_at"),
    )


def _record_versions(metadata: sa.MetaData, tables: Tables) -> None:
    proofs = {1: tables.migration, 2: tables.operation, 3: tables.setting}

    def record(target: Any, connection: sa.Connection, tables: Any = (), **_: Any) -> None:
        for version, proof in proofs.items():
            if proof in (tables or ()):
                connection.execute(proofs[1].insert().values(version=version))

    # After all tables, not after one: the version covers all of them.
    sa.event.listen(metadata, "after_create", record)
