"""The modules of the app that users import, and the names in them, stay where they are."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES = {
    "admin": ("OutboxEventAdmin",),
    "beat": ("beat_schedule",),
    "celery": ("OutboxTask",),
    "drain": ("Drained", "drain", "upkeep"),
    "emit": ("aemit_event", "aemit_events", "emit_event", "emit_events", "emits"),
    "handlers": ("outbox_handler",),
    "inbox": ("once", "only_once"),
    "models": ("InboxMessage", "OutboxDestination", "OutboxEvent"),
    "outbox": ("get_outbox",),
    "receiver": ("DjangoInbox", "Receiver", "atomic_connection"),
    "signals": ("destination_paused", "event_delivered", "event_failed"),
    "tables": ("CreateOutboxTables", "NamedIndex", "OutboxJSONField", "OutboxUUIDField", "UTCDateTimeField"),
    "task_backend": ("OutboxBackend",),
    "tasks": ("cleanup_delivered_outbox_events_task", "deliver_outbox_events_task"),
    "testing": ("DjangoProbe", "OutboxTestMixin"),
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_that_users_import_are_there(module: str) -> None:
    found = import_module(f"relaybox.contrib.django.{module}")
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
