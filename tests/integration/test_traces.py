"""One trace from the emitter, through the relay, to the receiver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from celery import Celery
from celery.contrib.testing.worker import start_worker
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.ext.asyncio import create_async_engine

from relaybox import Destination, Event, Retry
from relaybox.contrib.asgi import Receiver
from relaybox.contrib.celery import inbox_task
from relaybox.core.outcome import Delivered
from relaybox.receive.inbox import Inbox
from relaybox.sinks.celery import CelerySink
from tests.databases import async_url
from tests.databases import engine as sync_engine
from tests.integration.consumed import SECRET, delivery
from tests.integration.shop import QUICK, Databases, Shop, shop_for
from tests.spans import collecting, named
from tests.waiting import await_for, wait_for


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return collecting(monkeypatch)


@pytest.fixture
def url(migrated_database: Databases) -> str:
    return migrated_database("postgresql-18")


@pytest.fixture
def shop(url: str) -> Shop:
    return Shop(url)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    task = asyncio.create_task(server._serve())
    await await_for(lambda: server.started, "a server")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        await task


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def test_one_trace_leads_from_emit_through_the_relay_to_the_receiver(
    url: str, spans: InMemorySpanExporter
) -> None:
    engine = create_async_engine(async_url(url))
    receiver = Receiver(secret=SECRET, inbox=Inbox(), transaction=engine, consumer="billing")
    tries = 0

    @receiver.on("order.*")
    async def on_order(event: Event, connection: Any) -> None:
        nonlocal tries
        tries += 1
        with trace.get_tracer("shop").start_as_current_span("book"):
            if tries == 1:
                raise Retry("not yet")

    async with served(receiver) as address:
        runner = Destination("runner", address, secret=SECRET, allow=["127.0.0.0/8"], **QUICK)
        shop = shop_for(url, runner)
        with trace.get_tracer("shop").start_as_current_span("checkout") as checkout:
            await asyncio.to_thread(shop.emit, 1)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states() == {"delivered": 1}, "the delivery")
    await engine.dispose()
    emitter = checkout.get_span_context()
    sends, processes, books = (
        named(spans, name) for name in ("relaybox send runner", "relaybox process billing", "book")
    )
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {emitter.trace_id}
    assert [(span.kind, parent(span)) for span in sends] == [(SpanKind.PRODUCER, emitter.span_id)] * 2
    assert [[link.context.span_id for link in span.links] for span in sends] == [[emitter.span_id]] * 2
    assert [span.attributes["relaybox.attempt"] for span in sends] == [1, 1]
    assert [span.status.status_code for span in sends] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [(span.kind, parent(span)) for span in processes] == [(SpanKind.CONSUMER, emitter.span_id)] * 2
    assert [parent(span) for span in books] == [span.context.span_id for span in processes]


async def test_handlers_continue_the_emitters_trace(shop: Shop, spans: InMemorySpanExporter) -> None:
    @shop.outbox.handler("order.*", name="in the loop", **QUICK)
    async def in_the_loop(event: Event) -> None:
        await asyncio.sleep(0)
        trace.get_tracer("shop").start_span("in the loop").end()

    @shop.outbox.handler("order.*", name="in a thread", **QUICK)
    def in_a_thread(event: Event) -> None:
        trace.get_tracer("shop").start_span("in a thread").end()

    with trace.get_tracer("shop").start_as_current_span("checkout") as checkout:
        shop.emit(3)
    shop.emit(1)
    await shop.outbox.adrain()
    emitter = checkout.get_span_context()
    for name in ("in the loop", "in a thread"):
        parents = [parent(span) for span in named(spans, name)]
        assert sorted(parents, key=str) == sorted([emitter.span_id] * 3 + [None], key=str)
        assert len(named(spans, f"relaybox send {name}")) == 3


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.full
def test_a_celery_task_continues_the_emitters_trace(
    url: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    app.conf.update(task_always_eager=eager)
    engine = sync_engine(url)
    seen: list[int] = []

    @inbox_task(inbox=Inbox(), transaction=engine, app=app, name="shop.index", shared=False)
    def index(connection: Any, event: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    async def send() -> Any:
        sink = CelerySink(Destination("celery", "celery:shop.index"))
        answers = await sink.send([delivery(headers=f'{{"traceparent": "00-{5:032x}-{7:016x}-00"}}')])
        await sink.close()
        return answers

    assert asyncio.run(send()) == [Delivered()]
    if not eager:
        monkeypatch.setattr(logging.root, "level", logging.root.level)
        with start_worker(app, perform_ping_check=False, shutdown_timeout=30, loglevel="ERROR"):
            wait_for(lambda: seen)
    app.close()
    assert seen == [5]


async def test_a_relay_without_an_sdk_makes_no_spans(shop: Shop) -> None:
    seen: list[Any] = []

    @shop.outbox.handler("order.*", name="on_order", **QUICK)
    async def on_order(event: Event) -> None:
        seen.append(event.headers)

    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(5, 7, False, trace.TraceFlags(1)))):
        shop.emit(1)
    relay = shop.outbox.relay()
    assert not relay._shared.observer.timed
    await relay.drain()
    assert seen == [{"traceparent": f"00-{5:032x}-{7:016x}-01"}]
