"""Store the W3C trace context with an event, and restore it where the event is handled.

Only OpenTelemetry's API is used, and only if the application has imported it. Otherwise no span can be
current, and nothing here costs more than a lookup.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, json

from relaybox.core.event import Event

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

NAMES = ("traceparent", "tracestate")
SYSTEM = "relaybox"

_API = "opentelemetry.trace"
_version = functools.cache(version)
_SAMPLED = re.compile(r'"traceparent": ?"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-0[13]"')
_TRACE_ID = re.compile(r'"traceparent": ?"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}"')


def current() -> dict[str, str]:
    """Return the context of the current span as headers, or ``{}`` without a span."""
    if _API not in sys.modules:
        return {}
    from opentelemetry.trace import get_current_span

    if not get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier


def trace_id(headers: str) -> str | None:
    """Return the trace id in an event's stored headers."""
    found = _TRACE_ID.search(headers) if '"traceparent"' in headers else None
    return None if found is None else found[1]


def sampled(headers: str) -> bool:
    """True if the stored headers say that the emitter's span is recorded."""
    # Called for every delivery, so a cheap test comes first. Flag 1 is "sampled", flag 2 "random trace id".
    return ('-01"' in headers or '-03"' in headers) and _SAMPLED.search(headers) is not None


def stored(headers: str) -> Context | None:
    """Return the emitter's context from stored headers, or ``None`` without a context or OpenTelemetry."""
    if '"traceparent"' not in headers or _API not in sys.modules:
        return None
    try:
        decoded = json.decode(headers)
    except DecodeError:
        return None
    return received(decoded) if isinstance(decoded, dict) else None


def received(headers: Mapping[str, Any]) -> Context | None:
    """Return the current context plus the emitter's span; ``None`` if absent, or its trace is current."""
    if "traceparent" not in headers or _API not in sys.modules:
        return None
    from opentelemetry.context import get_current
    from opentelemetry.trace import get_current_span

    carrier = {name: headers[name] for name in NAMES if isinstance(headers.get(name), str)}
    now = get_current()
    context = _propagator().extract(carrier, now)
    if context is now:
        return None
    same = get_current_span(now).get_span_context().trace_id
    return None if get_current_span(context).get_span_context().trace_id == same else context


@contextmanager
def attached(context: Context | None) -> Iterator[None]:
    """Make this context the current one while the block runs."""
    if context is None:
        yield
        return
    from opentelemetry.context import attach, detach

    token = attach(context)
    try:
        yield
    finally:
        detach(token)


@contextmanager
def processing(event: Event, consumer: str) -> Iterator[None]:
    """Run handlers in a span of the emitter's trace; without an SDK, only its context becomes current."""
    if "traceparent" not in event.headers or _API not in sys.modules:
        yield
        return
    from opentelemetry.trace import SpanKind

    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": consumer,
        "messaging.message.id": str(event.id),
        "relaybox.event_type": event.type,
        "relaybox.attempt": event.attempt,
    }
    with tracer().start_as_current_span(
        f"relaybox process {consumer}", received(event.headers), SpanKind.CONSUMER, attributes
    ):
        yield


def has_provider() -> bool:
    """True if the application has set up an SDK that receives spans."""
    if _API not in sys.modules:
        return False
    from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider

    return not isinstance(get_tracer_provider(), ProxyTracerProvider)


def tracer() -> Tracer:
    """Return the tracer for Relaybox's spans."""
    from opentelemetry.trace import get_tracer

    return get_tracer("relaybox", _version("relaybox"))


@functools.cache
def _propagator() -> TraceContextTextMapPropagator:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
