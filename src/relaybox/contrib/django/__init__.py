"""Relaybox as a Django app. These names can be imported before the apps are ready."""

from relaybox.contrib.django.conf import enabled, rollout, shadow
from relaybox.contrib.django.emit import aemit_event, aemit_events, emit_event, emit_events, emits
from relaybox.contrib.django.handlers import outbox_handler
from relaybox.contrib.django.inbox import once, only_once

__all__ = [
    "aemit_event",
    "aemit_events",
    "emit_event",
    "emit_events",
    "emits",
    "enabled",
    "once",
    "only_once",
    "outbox_handler",
    "rollout",
    "shadow",
]
