"""What can be asked of the tables, and how failed deliveries are given another try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

from django.db import connections, models
from django.db.models import Q
from django.db.models.expressions import RawSQL

from relaybox.admin import NAMED, Admin, Done, Named
from relaybox.contrib.django.databases import dialect_of
from relaybox.contrib.django.tables import UTCDateTimeField


class DatabaseNow(models.Expression):  # type: ignore[misc]
    """The database's clock at this moment, by which the relays decide."""

    def __init__(self) -> None:
        super().__init__(output_field=UTCDateTimeField())

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[()]]:
        """A subquery: a function that may answer anew for every row is no bound of an index."""
        now = dialect_of(connection).words["now"]
        return f"(SELECT {now})".replace("%", "%%"), ()


# Written out: SQLite uses a partial index only for a condition that it can read before values are bound.
PENDING = RawSQL("'pending'", (), models.CharField())
DELIVERED = RawSQL("'delivered'", (), models.CharField())
FAILED = RawSQL("'failed'", (), models.CharField())
DISCARDED = RawSQL("'discarded'", (), models.CharField())


def refusal(model: type[models.Model], method: str, fix: str) -> TypeError:
    """What to say of an attempt to write a row other than by the outbox's own statements."""
    return TypeError(f"{model.__name__}.{method} is not for the rows of {model._meta.db_table}: {fix}")


EMIT = "only the outbox writes them; emit an event with relaybox.contrib.django.emit_event()"
GIVE_UP = "discard an event that nobody wants any more; what was delivered goes when its retention is over"


class OutboxQuerySet(models.QuerySet):  # type: ignore[misc]
    """Rows to read; ``update()`` and ``delete()`` are left as they are, for repairs."""

    def create(self, **kwargs: Any) -> Any:
        """Refused."""
        raise refusal(self.model, "objects.create()", EMIT)

    def bulk_create(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise refusal(self.model, "objects.bulk_create()", EMIT)

    def bulk_update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise refusal(self.model, "objects.bulk_update()", EMIT)


class OutboxEventQuerySet(OutboxQuerySet):
    """Deliveries by where they are.

    A pending one is exactly one of due, scheduled, parked and being sent.
    """

    def pending(self) -> OutboxEventQuerySet:
        """Not final: due, scheduled, parked or being sent."""
        return self._only(status=PENDING)

    def due(self) -> OutboxEventQuerySet:
        """Waiting for a relay: their time has come and nobody has them."""
        return self._waiting()._only(next_attempt_at__lte=DatabaseNow())

    def scheduled(self) -> OutboxEventQuerySet:
        """For later: backing off after a failure, or emitted for a later moment."""
        return self._waiting()._only(next_attempt_at__gt=DatabaseNow())

    def parked(self) -> OutboxEventQuerySet:
        """Behind an earlier event of their key."""
        return self._waiting()._only(next_attempt_at=None)

    def sending(self) -> OutboxEventQuerySet:
        """In a relay's hands: leased, and the lease has not run out."""
        return self.pending()._only(leased_until__gt=DatabaseNow())

    def delivered(self) -> OutboxEventQuerySet:
        """Acknowledged by their destination."""
        return self._only(status=DELIVERED)

    def failed(self) -> OutboxEventQuerySet:
        """Given up by the relay, for an operator to retry or discard."""
        return self._only(status=FAILED)

    def discarded(self) -> OutboxEventQuerySet:
        """Given up by an operator."""
        return self._only(status=DISCARDED)

    def retry(self, *, actor: str = "django") -> int:
        """Let the failed ones start anew, with all their attempts; returns how many.

        ``actor`` is who the audit says it was.
        """
        from relaybox.contrib.django.dispatch import after_commit
        from relaybox.contrib.django.service import ask

        self._for_write = True
        retried = 0
        for rows in self._failed():
            named = Named([id_ for _, id_ in rows], exact=True)

            async def work(admin: Admin, named: Named = named) -> Done:
                return await admin.retry(named)

            retried += ask(self.db, actor, work).affected
            after_commit(connections[self.db], [(destination, str(id_)) for destination, id_ in rows])
        return retried

    retry.alters_data = True  # type: ignore[attr-defined]

    def _failed(self) -> Iterator[Sequence[tuple[str, UUID]]]:
        """Destinations and ids, so many at once that the audit names each of them."""
        rows = self if self.query.is_sliced else self.failed()
        found = [
            (destination, id_)
            for id_, destination, status in rows.values_list("id", "destination", "status")
            if status == "failed"
        ]
        for start in range(0, len(found), NAMED):
            yield found[start : start + NAMED]

    def _only(self, *conditions: Q, **named: Any) -> OutboxEventQuerySet:
        found: OutboxEventQuerySet = self.filter(*conditions, **named)
        return found

    def _waiting(self) -> OutboxEventQuerySet:
        return self.pending()._only(Q(leased_until=None) | Q(leased_until__lte=DatabaseNow()))
