"""The differences between databases: pieces of SQL, and conversion of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_type_hints
from uuid import UUID

from relaybox.core.commands import Program
from relaybox.core.event import Delivery
from relaybox.core.values import without_password
from relaybox.errors import Locked, NoTables, RowRefused, StoreError
from relaybox.wire.codec import Limits

_ID, _EVENT_ID, _CREATED_AT, _LEASE_TOKEN = map(
    Delivery.__struct_fields__.index, ("id", "event_id", "created_at", "lease_token")
)
_TYPES: tuple[Any, ...] = tuple(get_type_hints(Delivery)[name] for name in Delivery.__struct_fields__)

EARLIEST = datetime.min.replace(tzinfo=UTC)
"""Replaces an unreadable time, which a manual edit can leave in a row."""
LATEST = datetime.max.replace(tzinfo=UTC)


class Unreadable(Exception):
    """A row that cannot become a delivery; the message says why."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL words, conversions and JSON limits of one database."""

    name: str
    words: Mapping[str, str]
    to_uuid: Callable[[UUID], Any]
    to_time: Callable[[datetime], Any]
    from_uuid: Callable[[Any], UUID]
    from_time: Callable[[Any], datetime]
    limits: Limits
    returning: bool = True
    one_statement: bool = False
    """True if one statement can change two tables, or change a row and return its old values."""
    native: bool = False
    """True if UUIDs and times arrive as Python objects."""
    typed: bool = True
    """True if the database enforces column types."""
    quote: str = '"'

    def delivery(self, row: Sequence[Any]) -> Delivery:
        """Convert a claimed row; raise ``Unreadable`` if its values are invalid."""
        if self.native:
            return Delivery(*row)
        values = list(row)
        try:
            for index in (_ID, _EVENT_ID, _LEASE_TOKEN):
                values[index] = self.from_uuid(values[index])
        except (ValueError, TypeError, AttributeError):
            raise Unreadable("its id or its event_id is not a UUID") from None
        if self.to_uuid(values[_ID]) != row[_ID]:
            raise Unreadable("its id is not written as 32 hexadecimal digits, by which it would be settled")
        values[_CREATED_AT] = self.from_time(values[_CREATED_AT])
        if not self.typed and not all(map(isinstance, values, _TYPES)):
            kinds = zip(Delivery.__struct_fields__, values, _TYPES, strict=True)
            wrong = next(name for name, value, kind in kinds if not isinstance(value, kind))
            raise Unreadable(f"its {wrong} is of another type than that of the column")
        return Delivery(*values)


def _utc_text(value: datetime) -> str:
    # Not strftime: it writes years before 1000 with fewer digits, which breaks comparison as text.
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _from_text(value: str) -> datetime:
    try:
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    except (ValueError, TypeError):
        return EARLIEST


def _from_naive(value: Any) -> datetime:
    # A date such as 0000-00-00 arrives as text.
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else EARLIEST


# ``later`` is :seconds from now, ``item_later`` a record's own. ``due`` and ``head`` hold the destination of
# pending rows, and of pending or failed rows. ``items``, ``keys`` and ``chosen`` turn a JSON parameter into a
# table. ``set`` prefixes a column of ``e`` in SET. ``join`` reads its left side first. ``this`` is the row
# that was read.

# Drop headers that are not an object: they would make the whole statement fail every time.
_DEAD_LETTER_HEADERS = """JSON_SET(
        CASE WHEN NOT JSON_VALID(headers) THEN JSON_OBJECT()
            WHEN UPPER(JSON_TYPE(headers)) <> 'OBJECT' THEN JSON_OBJECT() ELSE headers END,
        '$."relaybox-dead-letter-from"', destination, '$."relaybox-dead-letter-reason"', s.error)"""

_ON_CONFLICT = {
    "or_nothing": "ON CONFLICT DO NOTHING",
    "answer": "RETURNING name",
    "or_nothing_but_the_key": "ON CONFLICT DO NOTHING RETURNING event_id",
    "latest": "",
    "or_replace_attempt": """ON CONFLICT (delivery_id, attempt) DO UPDATE
    SET failed_at = {now}, relay = excluded.relay, error_message = excluded.error_message""",
    "due": "destination",
    "head": "destination",
    "set": "",
    "by_id": "",
    "by_due": "",
    "by_head": "",
}

POSTGRESQL = Dialect(
    name="postgresql",
    words=_ON_CONFLICT
    | {
        "now": "clock_timestamp()",
        "later": "clock_timestamp() + :seconds * interval '1 second'",
        "item_later": "clock_timestamp() + s.seconds * interval '1 second'",
        "least": "least",
        "lock": "FOR UPDATE",
        "items": """json_to_recordset(CAST(:items AS json)) AS s(id uuid, token uuid, status text,
        seconds float8, error text, given_back int, cut_off int, attempt int, relay text,
        copy uuid)""",
        "dead_letter_headers": """CASE jsonb_typeof(headers) WHEN 'object' THEN headers
        ELSE jsonb_build_object() END || jsonb_build_object(
        'relaybox-dead-letter-from', destination, 'relaybox-dead-letter-reason', error)""",
        "keys": "json_array_elements_text(CAST(:keys AS json)) AS k(ordering_key)",
    },
    to_uuid=str,
    to_time=lambda value: value,
    from_uuid=lambda value: value,
    from_time=lambda value: value,
    limits=Limits(),
    one_statement=True,
    native=True,
)


def _mysql(name: str, collation: str) -> Dialect:
    return Dialect(
        name=name,
        words={
            "now": "UTC_TIMESTAMP(6)",
            "later": "UTC_TIMESTAMP(6) + INTERVAL (:seconds * 1000000) MICROSECOND",
            "item_later": "UTC_TIMESTAMP(6) + INTERVAL (s.seconds * 1000000) MICROSECOND",
            "least": "LEAST",
            "size": "COALESCE(OCTET_LENGTH(payload), OCTET_LENGTH(payload_data), 0) "
            "+ COALESCE(OCTET_LENGTH(headers), 0)",
            "lock": "FOR UPDATE",
            "skip_locked": "FOR UPDATE SKIP LOCKED",
            "or_nothing": "ON DUPLICATE KEY UPDATE name = name",
            "answer": "",
            "or_nothing_but_the_key": "ON DUPLICATE KEY UPDATE event_id = event_id",
            # The transaction's snapshot may be older than the row it collided with.
            "latest": "LOCK IN SHARE MODE",
            "or_replace_attempt": """ON DUPLICATE KEY UPDATE
        failed_at = {now}, relay = VALUES(relay), error_message = VALUES(error_message)""",
            "due": "due_destination",
            "head": "head_destination",
            "set": "e.",
            # On a small table the optimiser prefers to read, and lock, every row.
            "by_id": "FORCE INDEX (PRIMARY)",
            # With the destination alone it reads every parked row: they come first in the index.
            "by_due": "FORCE INDEX ({due_index})",
            "by_head": "FORCE INDEX ({head_index})",
            "items": """JSON_TABLE(:items, '$[*]' COLUMNS (
            id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.id',
            token CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.token',
            status VARCHAR(20) PATH '$.status', seconds DOUBLE PATH '$.seconds', error TEXT PATH '$.error',
            given_back INT PATH '$.given_back', cut_off INT PATH '$.cut_off',
            attempt INT PATH '$.attempt', relay VARCHAR(200) PATH '$.relay',
            copy CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.copy')) s""",
            "join": "STRAIGHT_JOIN",
            "this": "id = :id",
            "dead_letter_headers": _DEAD_LETTER_HEADERS,
            "keys": "JSON_TABLE(:keys, '$[*]' COLUMNS (ordering_key VARCHAR(255) CHARACTER SET utf8mb4 "
            f"COLLATE {collation} PATH '$')) k",
            "chosen": "JSON_TABLE(:only, '$[*]' COLUMNS (chosen_id CHAR(32) CHARACTER SET ascii "
            "COLLATE ascii_bin PATH '$')) c",
        },
        to_uuid=lambda value: value.hex,
        to_time=lambda value: value.astimezone(UTC).replace(tzinfo=None),
        from_uuid=UUID,
        from_time=_from_naive,
        # MariaDB's JSON_VALID rejects deeper documents.
        limits=Limits(max_depth=31),
        returning=False,
        quote="`",
    )


MYSQL = _mysql("mysql", "utf8mb4_0900_bin")
MARIADB = _mysql("mariadb", "utf8mb4_nopad_bin")

SQLITE = Dialect(
    name="sqlite",
    words=_ON_CONFLICT
    | {
        "now": "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')",
        "later": "(strftime('%Y-%m-%d %H:%M:%f', 'now', :seconds || ' seconds') || '000')",
        "item_later": "(strftime('%Y-%m-%d %H:%M:%f', 'now', s.seconds || ' seconds') || '000')",
        "least": "min",
        # ``length`` of a text counts characters.
        "size": "COALESCE(length(CAST(payload AS BLOB)), length(payload_data), 0) "
        "+ COALESCE(length(CAST(headers AS BLOB)), 0)",
        "lock": "",
        "skip_locked": "",
        "items": """(SELECT
            json_extract(value, '$.id') AS id, json_extract(value, '$.token') AS token,
            json_extract(value, '$.status') AS status, json_extract(value, '$.seconds') AS seconds,
            json_extract(value, '$.error') AS error, json_extract(value, '$.given_back') AS given_back,
            json_extract(value, '$.cut_off') AS cut_off, json_extract(value, '$.attempt') AS attempt,
            json_extract(value, '$.relay') AS relay, json_extract(value, '$.copy') AS copy
        FROM json_each(:items)) AS s""",
        "keys": "(SELECT value AS ordering_key FROM json_each(:keys)) AS k",
        "chosen": "(SELECT value AS chosen_id FROM json_each(:only)) AS c",
        "join": "CROSS JOIN",
        # Text that is not valid UTF-8 was read as bytes, and bytes never equal text.
        "this": "id IN (:id, CAST(:text AS TEXT))",
        "dead_letter_headers": _DEAD_LETTER_HEADERS,
    },
    to_uuid=lambda value: value.hex,
    to_time=_utc_text,
    from_uuid=UUID,
    from_time=_from_text,
    limits=Limits(),
    typed=False,
)

DIALECTS = {dialect.name: dialect for dialect in (POSTGRESQL, MYSQL, MARIADB, SQLITE)}

# Undefined table, column or schema in PostgreSQL; table or column in MySQL, as SQLSTATE and number.
_NO_TABLE = frozenset({"42P01", "42703", "3F000", "42S02", "42S22", 1146, 1054})
LOCK_NOT_AVAILABLE, LOCK_WAIT_TIMEOUT = "55P03", 1205
_NO_TABLE_IN_SQLITE = ("no such table", "has no column")
# Violations of a unique key or a CHECK in MySQL and MariaDB.
_CONSTRAINTS = (1062, 3819, 4025)


def missing_tables(error: BaseException) -> str | None:
    """Return a message for a driver's error about a missing table or column, else ``None``."""
    code = _code(error)
    if not isinstance(code, str | int) or not (code in _NO_TABLE or _is_missing_in_sqlite(code)):
        return None
    problem = "the tables are missing or too old for this version"
    return f"{problem} ({_summary(error)}); run `{Program.migrate}`{Program.otherwise}"


def refusal(error: Exception, url: str = "") -> StoreError:
    """Translate a driver's error, without the password in the URL."""
    missing = missing_tables(error)
    if missing:
        return NoTables(missing)
    text = without_password(str(error), url) if url else str(error)
    text = " ".join(text.split()) or type(error).__name__
    # MySQL's drivers also report a SQLSTATE, which many errors share: compare the number.
    if _code(error) == LOCK_NOT_AVAILABLE or error.args[:1] == (LOCK_WAIT_TIMEOUT,):
        return Locked(f"another session holds a lock for too long ({text}); end its transaction")
    return RowRefused(text) if _breaks_constraint(error) else StoreError(text)


def _breaks_constraint(error: Exception) -> bool:
    # Every driver has a class of this name, but not every driver uses it for a CHECK.
    named = any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)
    return named or (*error.args, None)[0] in _CONSTRAINTS


def _code(error: BaseException) -> Any:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or (*error.args, None)[0]


def _is_missing_in_sqlite(message: str | int) -> bool:
    return isinstance(message, str) and any(words in message for words in _NO_TABLE_IN_SQLITE)


def _summary(error: Any) -> str:
    """Return the message without the statement excerpt that PostgreSQL's drivers append."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or str(error).partition("\n")[0]
