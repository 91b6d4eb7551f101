"""Where the events of uploads are, for the page."""

from collections.abc import Iterable

from relaybox.contrib.django.models import OutboxEvent

from .models import Upload


def latest_deliveries(uploads: Iterable[Upload]) -> dict[str, OutboxEvent]:
    """The delivery of ``file.stored`` for each upload, by its id; each with a ``state`` in one word."""
    events = OutboxEvent.objects.filter(
        aggregate_type="Upload",
        aggregate_id__in=[str(upload.pk) for upload in uploads],
        event_type="file.stored",
    )
    sending = set(events.sending().values_list("pk", flat=True))
    found = {}
    # A replay is a later delivery of the same event, and then the one that counts.
    for event in events.order_by("position"):
        waiting = "sending" if event.pk in sending else "waiting"
        event.state = waiting if event.status == OutboxEvent.Status.PENDING else event.status
        found[event.aggregate_id] = event
    return found
