"""The mark of a Celery task that is queued, so that one is queued at a time."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts

TEXTS = Texts(
    {
        "make": """
INSERT INTO {leader} (name, relay, term, leads_until) VALUES (:mark, '', 0, {now}) {or_nothing}""",
        "mark": """
UPDATE {leader} SET term = term + 1, leads_until = {later} WHERE name = :mark AND leads_until <= {now}""",
        "clear": "UPDATE {leader} SET leads_until = {now} WHERE name = :mark AND leads_until > {now}",
    }
)
