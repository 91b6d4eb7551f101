"""Make many rows of every kind, as after months of use."""

from __future__ import annotations

import json

from benchmarks.harness import PAYLOAD, run

# Ten rows per second until now, with the ids that they would have.
FILL = """
WITH numbered AS (
    SELECT n, md5(n::text) AS noise, n %% 1000 AS share, n < 100 AS old,
           now() - (%(rows)s - n) * interval '0.1 second' AS at
    FROM generate_series(0, %(rows)s - 1) AS n
), stated AS (
    SELECT *, (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(noise, 1, 3)
               || '8' || substr(noise, 4, 15))::uuid AS id,
           CASE WHEN old AND n %% 2 = 0 THEN 'discarded' WHEN share < 10 THEN 'failed'
                WHEN share < 30 THEN 'pending' ELSE 'delivered' END AS status
    FROM numbered
)
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key, status, attempts, next_attempt_at,
                          created_at, updated_at, delivered_at, error_message)
SELECT id, id, CASE WHEN old THEN 'legacy' ELSE (ARRAY['runner', 'billing', 'search'])[1 + n %% 3] END,
       'Order', (n %% 100000)::text, 'order.paid', %(payload)s, '{}',
       CASE WHEN share %% 2 = 0 THEN 'Order:' || n %% 100000 END, id::text, status,
       CASE status WHEN 'failed' THEN 5 WHEN 'pending' THEN share %% 3 ELSE 1 END,
       CASE WHEN status = 'pending' AND share %% 4 <> 0 THEN at + (share %% 3) * interval '1 day' END, at, at,
       CASE status WHEN 'delivered' THEN at END,
       CASE status WHEN 'failed' THEN 'answered 500: order ' || n || ' of shelf ' || chr(65 + n %% 7) END
FROM stated ORDER BY n"""

WEEK = """
INSERT INTO outbox_stats (minute, destination, relay, delivered, retried, failed, lag)
SELECT minute, destination, relay, 200, 3, 1, '{"10": 150, "20": 50}'
FROM minutes, unnest(ARRAY['runner', 'billing', 'search']) AS destination,
     unnest(ARRAY['relay-1', 'relay-2']) AS relay"""
SAMPLES = """
INSERT INTO outbox_sample (minute, destination, pending, failed, oldest_seconds, position)
SELECT minute, destination, 30, 10, 2.5, CASE destination WHEN '' THEN (row_number() OVER ()) * 600 END
FROM minutes, unnest(ARRAY['', 'runner', 'billing', 'search']) AS destination"""
MINUTES = """
WITH minutes AS (SELECT generate_series(date_trunc('minute', now()) - interval '7 days',
                                        date_trunc('minute', now()), '1 minute') AS minute)"""


def fill_week(url: str) -> None:
    """Write statistics and samples for every minute of the last week."""
    for statement in (WEEK, SAMPLES):
        run(url, MINUTES + statement)
    run(url, "VACUUM ANALYZE outbox_stats")
    run(url, "VACUUM ANALYZE outbox_sample")


def refill(url: str, rows: int) -> None:
    """Fill the table with this many rows."""
    run(url, "TRUNCATE outbox_event")
    run(url, FILL, {"rows": rows, "payload": json.dumps(PAYLOAD)})
    run(url, "VACUUM ANALYZE outbox_event")
    run(url, "CHECKPOINT")
