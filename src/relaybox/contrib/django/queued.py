"""The mark that a delivery task is queued and has not begun: while it stands, no other is queued.

It is taken away when the task begins, before it looks: what committed earlier is seen by that task, what
commits later queues another. The mark of a task that was lost loses its force after a while.
"""

from __future__ import annotations

from typing import Any

from relaybox.contrib.django.databases import connection_of, dialect_of, get_statements

_TEXTS = {
    "make": """
INSERT INTO {leader} (name, relay, term, leads_until) VALUES (:mark, '', 0, {now}) {or_nothing}""",
    "mark": """
UPDATE {leader} SET term = term + 1, leads_until = {later} WHERE name = :mark AND leads_until <= {now}""",
    "clear": "UPDATE {leader} SET leads_until = {now} WHERE name = :mark AND leads_until > {now}",
}
_NAME = "celery task"


def mark(using: str, seconds: float) -> bool:
    """Say that a task is queued; False: one was already, less than ``seconds`` ago."""
    if _change(using, "mark", seconds=seconds):
        return True
    return _change(using, "make") and _change(using, "mark", seconds=seconds)


def clear(using: str) -> None:
    """The task begins, or could not be queued."""
    _change(using, "clear")


def _change(using: str, name: str, **params: Any) -> bool:
    """Execute one statement; whether it changed the row."""
    connection = connection_of(using)
    query = get_statements(dialect_of(connection)).others(_TEXTS)(name, mark=_NAME, **params)
    with connection.cursor() as cursor:
        cursor.execute(query.sql, query.params)
        return bool(cursor.rowcount == 1)
