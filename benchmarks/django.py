"""Measure Django: the cost of ``emit_event``, of a Celery task's drain, and of the admin's list.

The requirements: ``emit_event`` takes at most 1.3 times as long as a minimal model's ``objects.create`` in
the same transaction. The drain of 20,000 events reaches 5 times the rate of django-outbox-pattern's
publisher, both into nothing. With 2,000,000 rows the list takes a constant number of queries without a scan,
and at most 300 ms. ``python -m benchmarks.django [emit] [drain] [admin]``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.harness import report, server
from tests.servers import fresh, redis

PARTS = ("emit", "drain", "admin")


@contextmanager
def project(version: str) -> Iterator[str]:
    """Set the project up on a new database and a new broker; return the database's URL."""
    with server(version) as server_url, fresh.database(server_url) as url, redis.server() as broker:
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.django_project.settings"
        os.environ["RELAYBOX_BENCH_DATABASE"] = url
        os.environ["RELAYBOX_BENCH_BROKER"] = broker
        import django
        from django.core.management import call_command
        from django.db import connections

        django.setup()
        from benchmarks.django_project.celery import app

        app.set_default()
        # The project's own model has no migrations.
        call_command("migrate", run_syncdb=True, verbosity=0)
        try:
            yield url
        finally:
            connections.close_all()


def main(parts: Sequence[str], version: str, events: int, rows: int) -> list[list[str]]:
    """Measure the parts one after the other; at the end, print the requirements and the figures."""
    with project(version) as url:
        # Models can be imported only now.
        from benchmarks import django_admin, django_drain, django_emit

        found: list[list[str]] = []
        if "emit" in parts:
            found += django_emit.measure(url)
        if "drain" in parts:
            found += django_drain.measure(url, events)
        if "admin" in parts:
            found += django_admin.measure(url, rows)
    columns = ["requirement", "bar", "measured", "met"]
    report(f"Django on PostgreSQL {version}", columns, found, {"met": all(row[-1] == "yes" for row in found)})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--postgres", choices=["18", "15"], default="18")
    parser.add_argument("--events", type=int, default=20_000, help="through each variant of the drain")
    parser.add_argument("--rows", type=int, default=2_000_000, help="behind the admin's list")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    main(chosen.parts or PARTS, chosen.postgres, chosen.events, chosen.rows)
