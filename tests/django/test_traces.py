"""Trace context through Django: what ``emit_event`` stores is current in handlers and receivers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings
from opentelemetry import trace

from relaybox import Event
from relaybox.contrib.django import configuration, emit_event, handlers, outbox_handler
from relaybox.contrib.django.drain import drain

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def seen() -> Iterator[list[int]]:
    from django.conf import settings

    before, found = dict(handlers.registered), list[int]()

    @outbox_handler("order.traced")
    def on_traced(event: Event) -> None:
        found.append(trace.get_current_span().get_span_context().trace_id)

    configuration.forget()
    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"}):
        yield found
    handlers.registered.clear()
    handlers.registered.update(before)
    configuration.forget()


def test_a_handler_continues_the_emitters_trace(using: str, seen: list[int]) -> None:
    span: Any = trace.NonRecordingSpan(trace.SpanContext(5, 7, False, trace.TraceFlags(1)))
    with trace.use_span(span), transaction.atomic(using=using):
        emit_event("order", 1, "order.traced", {}, using=using)
    with transaction.atomic(using=using):
        emit_event("order", 2, "order.traced", {}, using=using)
    assert drain(using).delivered == 2
    assert seen == [5, 0]
