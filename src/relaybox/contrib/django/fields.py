"""Fields that read and write values as the tables hold them, whatever Django's settings say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db import models
from django.db.models.fields.json import JSONExact
from django.db.models.lookups import Exact
from django.utils import timezone

from relaybox.contrib.django.databases import dialect_of


class OutboxUUIDField(models.UUIDField):  # type: ignore[misc]
    """A UUID: PostgreSQL's type, and 32 hexadecimal digits elsewhere.

    Django uses MariaDB's own type where there is one. It sorts UUIDs of version 7 in another order than time.
    """

    def db_type(self, connection: Any) -> str:
        """The column's type, which a foreign key to it takes over."""
        if connection.vendor == "mysql":
            return "char(32) CHARACTER SET ascii COLLATE ascii_bin"
        return str(super().db_type(connection))

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """A UUID, or its digits."""
        value = self.to_python(value)
        return value if value is None or connection.vendor == "postgresql" else value.hex

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> UUID | None:
        """A UUID; some of Django's backends made it already."""
        return UUID(value) if isinstance(value, str) else value


class UTCDateTimeField(models.DateTimeField):  # type: ignore[misc]
    """A moment: aware and in UTC in Python, also where USE_TZ is off; UTC in the database.

    A naive value that is written or looked for is taken to be in the zone of ``settings.TIME_ZONE``.
    """

    def get_prep_value(self, value: Any) -> datetime | None:
        """An aware moment."""
        value = super().get_prep_value(value)
        if value is None or timezone.is_aware(value):
            return value  # type: ignore[no-any-return]
        return timezone.make_aware(value, timezone.get_default_timezone())  # type: ignore[no-any-return]

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """The moment as the outbox's own statements write it."""
        value = value if prepared else self.get_prep_value(value)
        return None if value is None else dialect_of(connection).to_time(value)

    def from_db_value(self, value: datetime | None, expression: Any, connection: Any) -> datetime | None:
        """The moment in UTC."""
        if value is None:
            return None
        if connection.vendor != "postgresql":
            # Django's backend may have given it the zone that it supposes the column to be in.
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            # Without USE_TZ it is the wall time of the session's zone.
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)


class OutboxJSONField(models.JSONField):  # type: ignore[misc]
    """A JSON document, written as the outbox writes it.

    Where JSON is text, a whole document is looked for by its text.
    """

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Django's value; as text without blanks and escapes."""
        adapted = super().get_db_prep_value(value, connection, prepared)
        if not isinstance(adapted, str):
            return adapted
        return json.dumps(json.loads(adapted), separators=(",", ":"), ensure_ascii=False)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """The document."""
        # SQLite keeps a document that is a bare number as a number.
        if isinstance(value, int | float):
            return value
        return super().from_db_value(value, expression, connection)


@OutboxJSONField.register_lookup
class SameDocument(JSONExact):  # type: ignore[misc]
    """``payload={…}``: MariaDB's JSON is text, of which Django's functions would change the spacing."""

    def as_mysql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        """One text equal to the other."""
        if not connection.mysql_is_mariadb:
            sql, params = self.as_sql(compiler, connection)
            return sql, params
        column, column_params = compiler.compile(self.lhs)
        value, value_params = Exact.process_rhs(self, compiler, connection)
        return f"{column} = {value}", [*column_params, *value_params]
