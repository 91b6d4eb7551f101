"""A span for every attempt to deliver an event that was emitted in a trace.

The span is a child of the emitter's span and links to it, as OpenTelemetry's messaging conventions ask of a
process that sends another's message. An event that was not sampled gets no span.
"""

from __future__ import annotations

import time

from relaybox.core.clock import uptime
from relaybox.core.event import Delivery
from relaybox.core.fingerprint import error_class
from relaybox.core.outcome import Delivered
from relaybox.errors import MissingExtra
from relaybox.relay.observer import Observer, Sends
from relaybox.sinks.sink import Answer
from relaybox.wire.tracing import SYSTEM, sampled, stored, tracer

try:
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span
except ImportError:
    raise MissingExtra("opentelemetry-api", "otel") from None


class TracesObserver(Observer):
    """Makes spans with the application's tracer provider, after the sends."""

    timed = True

    def __init__(self) -> None:
        self._clock = uptime
        self._tracer = tracer()

    def sent(self, destination: str, sends: Sends) -> None:
        """Make a span for each delivery with a sampled emitter."""
        headers = [delivery.headers for delivery in sends.deliveries]
        traced = [at for at, text in enumerate(headers) if text != "{}" and sampled(text)]
        if not traced:
            return
        epoch = time.time_ns() - int(self._clock() * 1e9)
        for at in traced:
            began, ended = (epoch + int(times[at] * 1e9) for times in (sends.began, sends.ended))
            self._span(destination, sends.deliveries[at], sends.answers[at], began, ended)

    def _span(self, destination: str, delivery: Delivery, answer: Answer, began: int, ended: int) -> None:
        context = stored(delivery.headers)
        if context is None:
            return
        attributes: dict[str, str | int] = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "send",
            "messaging.operation.name": "send",
            "messaging.destination.name": destination,
            "messaging.message.id": str(delivery.event_id),
            "relaybox.event_type": delivery.event_type,
            "relaybox.aggregate_type": delivery.aggregate_type,
            "relaybox.attempt": delivery.attempts,
        }
        name, links = f"relaybox send {destination}", [Link(get_current_span(context).get_span_context())]
        span = self._tracer.start_span(name, context, SpanKind.PRODUCER, attributes, links, began)
        if not isinstance(answer, Delivered):
            reason = str(getattr(answer, "reason", ""))
            span.set_attribute("error.type", error_class(reason))
            span.set_status(Status(StatusCode.ERROR, reason or type(answer).__name__))
        span.end(ended)
