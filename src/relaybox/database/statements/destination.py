"""Statements that change a destination's row: its pause, circuit and rate limit."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts

ANY_DATABASE = {
    "open": """
UPDATE {destination}
SET circuit = 'open', circuit_until = {later}, circuit_reason = :reason, updated_at = {now}
WHERE name = :destination AND circuit = :state {answer}""",
    "probe": """
UPDATE {destination} SET circuit = 'half_open', circuit_until = {later}, updated_at = {now}
WHERE name = :destination AND circuit <> 'closed' AND circuit_until <= {now} {answer}""",
    "close": """
UPDATE {destination}
SET circuit = 'closed', circuit_until = NULL, circuit_reason = NULL, updated_at = {now}
WHERE name = :destination AND circuit = 'half_open' {answer}""",
    "pause": """
UPDATE {destination}
SET paused_at = {now}, paused_until = NULL, paused_by = :by, pause_reason = :reason, updated_at = {now}
WHERE name = :destination AND NOT {paused} {answer}""",
    "changed": "SELECT ROW_COUNT()",
}

STEPWISE = ANY_DATABASE | {
    "read_line": "SELECT rate_at, {now} FROM {destination} WHERE name = :destination {lock}",
    "move_line": "UPDATE {destination} SET rate_at = :at WHERE name = :destination",
}

POSTGRESQL = ANY_DATABASE | {
    # Reads the clock once the row is locked, so that time spent waiting is not handed out.
    "reserve": """
INSERT INTO {destination} AS d (name, rate_at) VALUES (:destination, {later})
ON CONFLICT (name) DO UPDATE SET rate_at = greatest(d.rate_at, {now}) + :seconds * interval '1 second'
RETURNING EXTRACT(EPOCH FROM rate_at - {now})""",
}


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    return Texts(POSTGRESQL if dialect == "postgresql" else STEPWISE)
