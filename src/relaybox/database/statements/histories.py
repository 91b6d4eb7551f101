"""Statements that compare recorded with committed events in a temporary SQLite database."""

from __future__ import annotations

TABLES = """
PRAGMA cache_size = -65536;
PRAGMA journal_mode = OFF;
CREATE TABLE recorded (event BLOB, place INTEGER, digest BLOB, PRIMARY KEY (event, place)) WITHOUT ROWID;
CREATE TABLE committed (
    event BLOB, position INTEGER, ordering_key TEXT, status TEXT, sent INTEGER, created INTEGER,
    compared INTEGER, PRIMARY KEY (event, position)
) WITHOUT ROWID;
"""
DIGESTS = """
SELECT place, digest FROM recorded WHERE event = ? AND digest IS NOT NULL ORDER BY place"""

# With min(), SQLite takes the other columns from that row: the event itself, before its replays.
FATES = """
SELECT event, ordering_key, min(position) AS position, status, max(sent), created, count(*),
    (SELECT min(place) FROM recorded WHERE recorded.event = committed.event),
    (SELECT count(*) FROM recorded WHERE recorded.event = committed.event)
FROM committed WHERE compared GROUP BY event ORDER BY ordering_key, position"""
STRANGERS = """
SELECT event, min(place) FROM recorded
WHERE NOT EXISTS (SELECT 1 FROM committed WHERE committed.event = recorded.event)
GROUP BY event ORDER BY min(place)"""
LEFT_OUT = """
SELECT count(*) FROM (SELECT event FROM committed GROUP BY event HAVING NOT max(compared)) AS uncompared
WHERE EXISTS (SELECT 1 FROM recorded WHERE recorded.event = uncompared.event)"""
RECORD = "INSERT OR IGNORE INTO recorded (place, event, digest) VALUES (?, ?, ?)"
COMMIT = "INSERT OR REPLACE INTO committed VALUES (?, ?, ?, ?, ?, ?, ?)"
SIZE = "SELECT count(*) FROM recorded"
ANY_PAYLOAD = "SELECT 1 FROM recorded WHERE digest IS NOT NULL LIMIT 1"
