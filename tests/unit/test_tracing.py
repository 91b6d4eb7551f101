"""Trace context: stored where an event is emitted, current where it is handled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from relaybox import Call, Destination, Event, Route
from relaybox.core.outcome import Delivered, Unavailable
from relaybox.core.settings import Settings
from relaybox.database.dialects import DIALECTS
from relaybox.database.statements.delivery import INSERTED
from relaybox.emit.row import RowBuilder
from relaybox.operate.observers.traces import TracesObserver
from relaybox.relay.observer import Sends
from relaybox.sinks.handler import HandlerSink
from relaybox.wire.envelope import packer
from relaybox.wire.tracing import attached, current, processing, received, sampled, stored, trace_id
from tests.spans import collecting, named
from tests.unit.deliveries import make

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
STORED = f'{{"traceparent": "{TRACEPARENT}", "tenant": "acme"}}'
SETTINGS = Settings(
    "postgresql://localhost/shop", [Destination("runner", "memory:")], [Route("*", to="runner")]
)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return collecting(monkeypatch)


def headers_of(**given: Any) -> dict[str, Any]:
    call = Call("Order", 1, "order.paid", {}, **given)
    [row] = RowBuilder(SETTINGS).build(call, DIALECTS["postgresql"]).rows
    return dict(msgspec.json.decode(row[INSERTED.index("headers")]))


def event(**headers: Any) -> Event:
    return Event(uuid4(), "order.paid", "Order", "1", {}, headers, 1, datetime.now(UTC))


def of(context: Any) -> tuple[str, str]:
    found = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)


def test_the_current_context_is_stored_unless_the_caller_gave_one(
    spans: InMemorySpanExporter,
) -> None:
    assert headers_of() == {}
    with trace.get_tracer("shop").start_as_current_span("checkout"):
        assert headers_of() == current()
        assert headers_of(headers={"a": 1}, tenant="acme") == {"a": 1, "tenant": "acme", **current()}
    [span] = named(spans, "checkout")
    assert span.context is not None
    assert current() == {}
    with trace.get_tracer("shop").start_as_current_span("checkout"):
        assert headers_of(headers={"traceparent": TRACEPARENT}) == {"traceparent": TRACEPARENT}
        assert headers_of(headers={"tracestate": "a=b"})["tracestate"] == "a=b"


def test_nothing_of_opentelemetry_is_imported_by_emitting() -> None:
    code = (
        "import sys; from relaybox.wire.tracing import current, stored, received;"
        f"assert current() == {{}}; assert stored({STORED!r}) is None;"
        f"assert received({{'traceparent': {TRACEPARENT!r}}}) is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stored_context_is_read() -> None:
    assert of(stored(STORED)) == (TRACE, SPAN)
    assert trace_id(STORED) == TRACE
    assert sampled(STORED)
    assert not sampled(STORED.replace("-01", "-00"))


@pytest.mark.parametrize(
    "headers",
    [
        *("{}", '{"traceparent": 5}', '{"traceparent": "00-nonsense"}'),
        *(f'{{"traceparent": "00-{"0" * 32}-{SPAN}-01"}}', f'{{"traceparent": "ff-{TRACE}-{SPAN}-01"}}'),
        *('{"traceparent"', '["traceparent"]'),
    ],
)
def test_an_invalid_context_is_ignored(headers: str) -> None:
    assert stored(headers) is None


def test_a_span_of_the_same_trace_that_is_current_already_stays(spans: InMemorySpanExporter) -> None:
    with attached(stored(STORED)):
        assert received({"traceparent": TRACEPARENT}) is None
        with trace.get_tracer("web").start_as_current_span("POST /events"):
            assert received({"traceparent": TRACEPARENT}) is None
        other = TRACEPARENT.replace(TRACE, "f" * 32)
        assert of(received({"traceparent": other})) == ("f" * 32, SPAN)


def test_handlers_run_in_a_span_of_the_emitters_trace(spans: InMemorySpanExporter) -> None:
    given = event(traceparent=TRACEPARENT)
    with processing(given, "billing"), trace.get_tracer("shop").start_as_current_span("book"):
        pass
    with pytest.raises(KeyError), processing(given, "billing"):
        raise KeyError("x")
    done, failed = named(spans, "relaybox process billing")
    [inside] = named(spans, "book")
    assert done.kind is SpanKind.CONSUMER
    assert done.parent is not None
    assert (trace.format_trace_id(done.context.trace_id), done.parent.span_id) == (TRACE, int(SPAN, 16))
    assert inside.parent.span_id == done.context.span_id
    assert done.attributes["messaging.message.id"] == str(given.id)
    assert (done.status.status_code, failed.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)


def test_an_event_without_a_context_is_handled_without_a_span(spans: InMemorySpanExporter) -> None:
    with processing(event(), "billing"):
        assert not trace.get_current_span().get_span_context().is_valid
    assert spans.get_finished_spans() == ()


def test_without_an_sdk_the_context_is_current_all_the_same() -> None:
    with processing(event(traceparent=TRACEPARENT), "billing"):
        assert of(None) == (TRACE, SPAN)


def test_a_send_is_a_span_below_the_emitters_with_a_link_to_it(spans: InMemorySpanExporter) -> None:
    observer = TracesObserver()
    now = time.monotonic()
    one, plain = make(headers=STORED, attempts=3), make()
    observer.sent("runner", Sends([one, plain], [Delivered()] * 2, [now - 0.5] * 2, [now] * 2))
    [span] = spans.get_finished_spans()
    assert (span.name, span.kind) == ("relaybox send runner", SpanKind.PRODUCER)
    assert span.parent is not None
    assert (trace.format_trace_id(span.context.trace_id), span.parent.span_id) == (TRACE, int(SPAN, 16))
    assert [of_link.context.span_id for of_link in span.links] == [int(SPAN, 16)]
    assert dict(span.attributes or {}) == {
        "messaging.system": "relaybox",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.destination.name": "runner",
        "messaging.message.id": str(one.event_id),
        "relaybox.event_type": "order.paid",
        "relaybox.aggregate_type": "Order",
        "relaybox.attempt": 3,
    }
    assert span.end_time - span.start_time == pytest.approx(0.5e9, rel=0.01)
    assert span.end_time == pytest.approx(time.time_ns(), abs=60e9)


def test_a_send_that_failed_says_why_and_an_unsampled_one_has_no_span(spans: InMemorySpanExporter) -> None:
    answer, unsampled = Unavailable("503 Service Unavailable"), make(headers=STORED.replace("-01", "-00"))
    sends = Sends([make(headers=STORED), unsampled], [answer, Delivered()], [1.0] * 2, [2.0] * 2)
    TracesObserver().sent("runner", sends)
    [span] = spans.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, answer.reason)
    assert span.attributes["error.type"] == "HTTP 503"


@pytest.mark.parametrize("kind", ["in the loop", "waits", "in a thread"])
async def test_a_handler_runs_in_the_emitters_context(kind: str) -> None:
    seen: list[tuple[str, str]] = []

    async def in_the_loop(event: Event) -> None:
        if kind == "waits":
            await asyncio.sleep(0.001)
        seen.append(of(None))

    def in_a_thread(event: Event) -> None:
        seen.append(of(None))

    handler = in_a_thread if kind == "in a thread" else in_the_loop
    sink = HandlerSink(Destination("on_order", "handler:"), handler)
    try:
        answers = await sink.send([make(headers=STORED), make()])
    finally:
        await sink.close()
    assert [type(answer) for answer in answers] == [Delivered, Delivered]
    assert sorted(seen) == sorted([(TRACE, SPAN), ("0" * 32, "0" * 16)])
    assert not trace.get_current_span().get_span_context().is_valid


def test_the_state_of_a_trace_travels_with_its_parent() -> None:
    both = f'{{"traceparent": "{TRACEPARENT}", "tracestate": "a=1,b=2"}}'
    assert packer("json")(make(headers=both)).headers == {"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"}
    for bad in ("a=1\\r\\nx: y", " a=1", "a" * 513, ""):
        headers = both.replace("a=1,b=2", bad)
        assert packer("json")(make(headers=headers)).headers == {"traceparent": TRACEPARENT}
    assert packer("json")(make(headers='{"tracestate": "a=1"}')).headers == {}
