"""Assigns ``position`` from a one-row counter on SQLite; the other databases generate it."""

from __future__ import annotations

import sqlalchemy as sa

POSITIONS = (
    ("after_create", "CREATE TABLE {counter} (id INTEGER PRIMARY KEY CHECK (id = 1), value BIGINT NOT NULL)"),
    ("after_create", "INSERT INTO {counter} (id, value) VALUES (1, 0)"),
    (
        "after_create",
        """CREATE TRIGGER {trigger} AFTER INSERT ON {event} BEGIN
    UPDATE {counter} SET value = value + 1;
    UPDATE {event} SET position = (SELECT value FROM {counter}) WHERE id = NEW.id;
END""",
    ),
    ("after_drop", "DROP TABLE {counter}"),
)


def count_positions(event: sa.Table, *, prefix: str) -> None:
    """Create and drop the counter and the trigger together with the table of events."""
    words = {
        "event": f'"{event.name}"',
        "trigger": f'"{event.name}_position"',
        "counter": f'"{prefix}outbox_position"',
    }
    for moment, statement in POSITIONS:
        ddl = sa.DDL(statement.format_map(words))  # type: ignore[no-untyped-call]
        sa.event.listen(event, moment, ddl.execute_if(dialect="sqlite"))
