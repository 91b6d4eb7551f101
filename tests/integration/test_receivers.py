"""Webhooks at an ASGI receiver: who is let in, what is run, what is answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import sqlalchemy as sa
import uvicorn
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute

from relaybox import Destination, Event, Outbox, Reject, Retry, Route, Unavailable, webhook
from relaybox.contrib.asgi import Receiver
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.integration.consumed import (
    ASYNC_DRIVERS,
    OTHER_SECRET,
    SECRET,
    Ground,
    driven,
    ground,
    insert,
    request,
    signed,
)

KINDS = ("postgresql-18", "mariadb", "sqlite")


@pytest.fixture(scope="module")
def shared(module_database: Callable[[str], str]) -> Iterator[Ground]:
    """A database that tests share; each looks at its own events."""
    with ground(module_database("postgresql-18")) as made:
        yield made


@pytest.fixture
async def engine(shared: Ground) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(driven(shared.url, ASYNC_DRIVERS))
    yield made
    await made.dispose()


class Response(NamedTuple):
    """What was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def detail(self) -> str:
        problem = json.loads(self.body)
        assert self.headers["content-type"] == "application/problem+json"
        assert problem["status"] == self.status
        return str(problem["detail"])


async def post(
    app: Any,
    headers: dict[str, str] | list[tuple[str, str]],
    body: bytes | list[bytes],
    *,
    method: str = "POST",
    path: str = "/",
) -> Response:
    """Send a request to an ASGI application, the body in these parts."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    parts = [body] if isinstance(body, bytes) else body
    incoming = [
        {"type": "http.request", "body": part, "more_body": n < len(parts)} for n, part in enumerate(parts, 1)
    ]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs],
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(start["status"], found, b"".join(message["body"] for message in rest))


def receiver(engine: AsyncEngine, **given: Any) -> Receiver:
    """One whose handler leaves an effect."""
    options = {"secret": SECRET, "inbox": Inbox(), "transaction": engine, "consumer": "books", **given}
    made = Receiver(**options)

    @made.on("order.*")
    async def effect(event: Event, connection: Any) -> None:
        await connection.execute(insert(event))

    return made


def effects(shared: Ground, headers: dict[str, str]) -> int:
    """How often the handler of this request took effect."""
    return [event_id for event_id, _ in shared.effects()].count(headers["webhook-id"])


async def test_an_event_is_handled_and_its_repetition_is_acknowledged(
    shared: Ground, engine: AsyncEngine
) -> None:
    made, (headers, body) = receiver(engine), request()
    answers = [await post(made, headers, body) for _ in range(3)]
    assert [answer.status for answer in answers] == [204, 204, 204]
    assert answers[0].body == b""
    assert effects(shared, headers) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_sixteen_at_once_take_effect_once(kind: str, fresh_database: Callable[[str], str]) -> None:
    with ground(fresh_database(kind)) as place:
        made = Receiver(
            secret=SECRET, inbox=Inbox(), transaction=sessionmaker(place.engine), consumer="books"
        )

        @made.on("order.*")
        def effect(event: Event, session: Session) -> None:
            session.execute(insert(event))

        headers, body = request()
        answers = await asyncio.gather(*(post(made, headers, body) for _ in range(16)))
        statuses = {answer.status for answer in answers}
        # SQLite has one writer, who may be waited for in vain: such a request comes again.
        assert 204 in statuses
        assert statuses <= ({204} if kind != "sqlite" else {204, 503, 500})
        assert effects(place, headers) == 1
        assert place.marks() == 1


async def test_the_session_of_a_sessionmaker_is_given_and_committed(
    shared: Ground, engine: AsyncEngine
) -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(consumer="orm"), transaction=async_sessionmaker(engine))
    given: list[Any] = []

    @made.on("order.*")
    async def effect(event: Event, session: AsyncSession) -> None:
        given.append(session)
        await session.execute(insert(event))

    headers, body = request()
    assert (await post(made, headers, body)).status == 204
    assert isinstance(given[0], AsyncSession)
    assert effects(shared, headers) == 1


@pytest.mark.parametrize(
    ("raised", "status", "retry_after"),
    [
        (Reject("no such order"), 422, None),
        (Retry("the order is not there yet"), 503, None),
        (Retry("later", after=2.2), 503, "3"),
        (Retry("later", after=timedelta(minutes=1)), 503, "60"),
        (Retry("now", after=-5), 503, "0"),
        (Unavailable("closed for stock-taking", after=120), 503, "120"),
    ],
)
async def test_what_a_handler_raises_is_told_to_the_sender(
    shared: Ground, engine: AsyncEngine, raised: Any, status: int, retry_after: str | None
) -> None:
    made, (headers, body) = receiver(engine), request()
    fails = [raised]

    @made.on("order.paid")
    async def fail(event: Event) -> None:
        if fails:
            raise fails.pop()

    answer = await post(made, headers, body)
    assert (answer.status, answer.headers.get("retry-after")) == (status, retry_after)
    assert answer.detail == raised.reason
    assert effects(shared, headers) == 0
    assert (await post(made, headers, body)).status == 204
    assert effects(shared, headers) == 1


async def test_an_exception_is_500_without_its_text_and_leaves_no_mark(
    shared: Ground, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    made, (headers, body) = receiver(engine), request()
    fails = [RuntimeError("password=hunter2")]

    @made.on("order.paid")
    async def fail(event: Event) -> None:
        if fails:
            raise fails.pop()

    with caplog.at_level(logging.ERROR, "relaybox.consumer"):
        answer = await post(made, headers, body)
    assert answer.status == 500
    assert b"hunter2" not in answer.body
    assert "hunter2" in caplog.text
    assert effects(shared, headers) == 0
    assert (await post(made, headers, body)).status == 204
    assert effects(shared, headers) == 1


async def test_a_handler_that_cancels_itself_is_a_failure(shared: Ground, engine: AsyncEngine) -> None:
    made, (headers, body) = receiver(engine), request()

    @made.on("order.paid")
    async def cancel(event: Event) -> None:
        raise asyncio.CancelledError

    assert (await post(made, headers, body)).status == 500
    assert effects(shared, headers) == 0


async def test_a_commit_that_fails_is_500_and_leaves_no_mark(shared: Ground, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            sa.text("CREATE TABLE IF NOT EXISTS late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        )
    made, (headers, body) = receiver(engine, consumer="late"), request()

    @made.on("order.paid")
    async def collide(event: Event, connection: Any) -> None:
        await connection.execute(sa.text("INSERT INTO late VALUES (1), (1)"))

    assert (await post(made, headers, body)).status == 500
    assert effects(shared, headers) == 0
    assert shared.marks("late") == 0


async def test_a_database_that_is_away_is_503_and_no_attempt() -> None:
    away = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none")
    headers, body = request()
    answer = await post(receiver(away), headers, body)
    assert answer.status == 503
    assert "127.0.0.1" not in answer.detail
    await away.dispose()


async def test_an_event_that_nobody_takes_is_acknowledged(shared: Ground, engine: AsyncEngine) -> None:
    headers, body = request("customer.moved")
    assert (await post(receiver(engine), headers, body)).status == 204
    assert effects(shared, headers) == 0


async def test_handlers_are_found_by_patterns_and_all_run(shared: Ground, engine: AsyncEngine) -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=engine, consumer="patterns")
    called: list[str] = []

    @made.on("order.paid")
    async def without_version(event: Event) -> None:
        called.append("order.paid")

    @made.on("file.*", "*")
    async def everything(event: Event) -> None:
        called.append("*")

    @made.on("order.paid.v1")
    async def other_version(event: Event) -> None:
        called.append("v1")

    headers, body = request("order.paid.v2")
    assert (await post(made, headers, body)).status == 204
    assert called == ["order.paid", "*"]


# --- who is let in ---


@pytest.mark.parametrize("at", [-400, 400])
async def test_a_stale_or_early_timestamp_is_401(shared: Ground, engine: AsyncEngine, at: float) -> None:
    headers, body = request(at=at)
    assert (await post(receiver(engine), headers, body)).status == 401
    assert (await post(receiver(engine, tolerance="10m"), headers, body)).status == 204
    assert effects(shared, headers) == 1


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
async def test_a_missing_header_is_401(shared: Ground, engine: AsyncEngine, missing: str) -> None:
    headers, body = request()
    answer = await post(receiver(engine), {k: v for k, v in headers.items() if k != missing}, body)
    assert answer.status == 401
    assert effects(shared, headers) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        {"webhook-signature": "v1,AAAA"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,ä"},
        {"webhook-id": str(uuid4())},
        {"webhook-timestamp": "yesterday"},
        {"webhook-timestamp": "9" * 40},
        {"webhook-timestamp": "-1"},
    ],
)
async def test_a_spoilt_header_is_401(shared: Ground, engine: AsyncEngine, spoil: dict[str, str]) -> None:
    headers, body = request()
    answer = await post(receiver(engine), headers | spoil, body)
    assert answer.status == 401
    assert SECRET not in answer.body.decode()
    assert effects(shared, headers) == 0


async def test_another_body_or_another_secret_is_401(shared: Ground, engine: AsyncEngine) -> None:
    headers, body = request()
    assert (await post(receiver(engine), headers, body + b" ")).status == 401
    assert (await post(receiver(engine, secret=OTHER_SECRET), headers, body)).status == 401
    assert effects(shared, headers) == 0


async def test_an_id_that_stands_there_twice_is_refused(shared: Ground, engine: AsyncEngine) -> None:
    headers, body = request()
    for doubled in (
        [("webhook-id", str(uuid4())), *headers.items()],
        [*headers.items(), ("Webhook-Id", "x")],
    ):
        answer = await post(receiver(engine, consumer="doubled"), doubled, body)
        assert answer.status == 400
        assert "webhook-id" in answer.detail
    assert shared.marks("doubled") == 0


async def test_any_of_several_secrets_lets_in(shared: Ground, engine: AsyncEngine) -> None:
    made = receiver(engine, secret=f"{SECRET} {OTHER_SECRET}")
    for secret in (SECRET, OTHER_SECRET):
        headers, body = request(secret=secret)
        assert (await post(made, headers, body)).status == 204
        assert effects(shared, headers) == 1


async def test_a_secret_in_a_file_is_read_again(
    shared: Ground, engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "READ_AGAIN_SECONDS", 0)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    made = receiver(engine, secret=f"file:{file}")
    headers, body = request(secret=OTHER_SECRET)
    assert (await post(made, headers, body)).status == 401
    file.write_text(f"{OTHER_SECRET}\n")
    assert (await post(made, headers, body)).status == 204
    file.unlink()
    headers, body = request(secret=OTHER_SECRET)
    assert (await post(made, headers, body)).status == 204
    headers, body = request()
    assert (await post(made, headers, body)).status == 401


async def test_only_post_is_answered(engine: AsyncEngine) -> None:
    headers, body = request()
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
        answer = await post(receiver(engine), headers, body, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "spoil",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "gzip"},
    ],
)
async def test_what_no_event_is_sent_as_is_415(engine: AsyncEngine, spoil: dict[str, str]) -> None:
    headers, body = request()
    assert (await post(receiver(engine), headers | spoil, body)).status == 415


async def test_a_content_type_may_have_parameters(shared: Ground, engine: AsyncEngine) -> None:
    headers, body = request()
    headers["content-type"] = "Application/JSON; charset=utf-8"
    assert (await post(receiver(engine), headers, body)).status == 204
    assert effects(shared, headers) == 1


async def test_a_body_is_read_up_to_its_limit(shared: Ground, engine: AsyncEngine) -> None:
    headers, body = request(payload=json.dumps("x" * 2000))
    small = receiver(engine, max_body="1KiB")
    announced = await post(small, headers | {"content-length": str(len(body))}, body)
    endless = await post(small, headers, [body[:1000], body[1000:]])
    lying = await post(small, headers | {"content-length": "9" * 30}, b"")
    assert {announced.status, endless.status, lying.status} == {413}
    assert "1,024" in announced.detail
    assert (await post(small, headers | {"content-length": "many"}, body)).status == 400
    assert effects(shared, headers) == 0
    assert (
        await post(receiver(engine, max_body=len(body)), headers, [body[:9], b"", body[9:]])
    ).status == 204


async def test_a_request_that_breaks_off_is_not_answered(engine: AsyncEngine) -> None:
    headers, body = request()
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": body[:5], "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await receiver(engine)({"type": "http", "method": "POST", "headers": pairs}, receive, send)
    assert sent == []


async def test_a_websocket_is_turned_away(engine: AsyncEngine) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await receiver(engine)({"type": "websocket"}, None, send)  # type: ignore[arg-type]
    assert sent[0]["type"] == "websocket.close"


# --- what is in it ---


def kept(engine: AsyncEngine) -> tuple[Receiver, list[Event]]:
    """A receiver that keeps the events it gets."""
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=engine, consumer="kept")
    events: list[Event] = []

    @made.on("*")
    async def keep(event: Event) -> None:
        events.append(event)

    return made, events


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "payload", ['{"total":42,"data":1}', "[1,2]", '"x"', "null", '{"data":{"a":1}}', "{}"]
)
@pytest.mark.parametrize("format", ["json", "flat", "cloudevents"])
async def test_an_envelope_is_opened(engine: AsyncEngine, format: str, payload: str) -> None:
    made, events = kept(engine)
    headers, body = request(format=format, payload=payload, headers=json.dumps({"traceparent": TRACE}))
    assert (await post(made, headers, body)).status == 204
    [event] = events
    assert str(event.id) == headers["webhook-id"]
    assert (event.type, event.aggregate_id) == ("order.paid", "7")
    assert event.aggregate_type == ("" if format == "flat" else "Order")
    assert event.payload == json.loads(payload)
    assert event.created_at == datetime(2026, 11, 15, 6, 15, 12, tzinfo=UTC)
    assert event.headers == {"traceparent": TRACE}
    assert event.attempt == 1


@pytest.mark.parametrize("format", ["json", "flat", "cloudevents", "payload"])
async def test_bytes_come_as_bytes(engine: AsyncEngine, format: str) -> None:
    made, events = kept(engine)
    given = {"payload": None, "payload_data": b"\0\xff", "payload_encoding": "binary"}
    headers, body = request(format=format, **given)
    assert (await post(made, headers, body)).status == 204
    assert [event.payload for event in events] == [b"\0\xff"]


async def test_a_bare_payload_has_no_type_and_goes_to_those_who_take_all(
    shared: Ground, engine: AsyncEngine
) -> None:
    made, events = kept(engine)
    headers, body = request(format="payload")
    assert (await post(made, headers, body)).status == 204
    assert [(event.type, event.payload) for event in events] == [("", {"total": 42})]
    refused = await post(receiver(engine), headers, body)
    assert refused.status == 422
    assert "event type" in refused.detail
    assert effects(shared, headers) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":1e999999}',
        b'{"a":"\xed\xa0\x80"}',
    ],
    ids=["empty", "cut", "no text", "deep", "number", "surrogate"],
)
async def test_what_is_no_json_is_400(engine: AsyncEngine, body: bytes) -> None:
    made, events = kept(engine)
    headers = signed(str(uuid4()), body) | {"content-type": "application/json"}
    answer = await post(made, headers, body)
    assert answer.status == 400
    assert events == []


@pytest.mark.parametrize(
    ("content_type", "fields"),
    [
        ("application/json", {"type": 5}),
        ("application/json", {"timestamp": "yesterday"}),
        ("application/json", {"timestamp": 5}),
        ("application/json", {"aggregate_id": 7}),
        ("application/json", {"aggregate_type": None}),
        ("application/cloudevents+json", {}),
        ("application/cloudevents+json", {"specversion": "0.3", "source": "/x"}),
        ("application/cloudevents+json", {"specversion": "1.0", "id": "other"}),
        ("application/cloudevents+json", {"specversion": "1.0", "type": None}),
        ("application/cloudevents+json", {"specversion": "1.0", "data_base64": "%"}),
        ("application/cloudevents+json", {"specversion": "1.0", "time": "noon"}),
    ],
)
async def test_a_malformed_envelope_is_400(
    engine: AsyncEngine, content_type: str, fields: dict[str, Any]
) -> None:
    made, events = kept(engine)
    event_id = str(uuid4())
    envelope = {
        "id": event_id,
        "type": "order.paid",
        "timestamp": "2026-11-15T06:15:12Z",
        "aggregate_type": "Order",
        "aggregate_id": "7",
        "data": {"hidden": "hunter2"},
    }
    body = json.dumps(envelope | fields).encode()
    answer = await post(made, signed(event_id, body) | {"content-type": content_type}, body)
    assert answer.status == 400
    assert b"hunter2" not in answer.body
    assert events == []


async def test_an_id_that_is_no_uuid_is_400(engine: AsyncEngine) -> None:
    made, events = kept(engine)
    answer = await post(made, signed("msg_1", b"{}") | {"content-type": "application/json"}, b"{}")
    assert (answer.status, answer.detail) == (400, "the message's id is no UUID")
    assert events == []


# --- how it is made ---


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"secret": SECRET, "inbox": Inbox(), "transaction": dict, "consumer": "c"}
    for wrong, message in [
        ({"secret": ""}, "secret is empty"),
        ({"secret": "env:NO_SUCH_SECRET"}, "NO_SUCH_SECRET"),
        ({"secret": "whsec_%"}, "not base64"),
        ({"consumer": None}, "consumer is missing"),
        ({"consumer": ""}, "consumer = ''"),
        ({"transaction": 5}, "transaction = 5"),
        ({"tolerance": "soon"}, "tolerance = 'soon'"),
        ({"max_body": "lots"}, "max_body = 'lots'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Receiver(**(given | wrong))


def test_handlers_that_cannot_be_are_refused() -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=dict, consumer="c")

    def no_parameter() -> None: ...

    def three(event: Event, session: Any, more: Any) -> None: ...

    def yields(event: Event) -> Iterator[None]:
        yield

    for function, message in [
        (no_parameter, "must take an Event"),
        (three, "must take an Event"),
        (yields, "yields"),
        (5, "no function"),
    ]:
        with pytest.raises(ConfigError, match=message):
            made.on("order.*")(function)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="which events"):
        made.on()
    with pytest.raises(ConfigError, match="which events"):
        made.on(lambda event: None)  # type: ignore[arg-type]

    @made.on("a")
    def one(event: Event) -> None: ...

    async def other(event: Event) -> None: ...

    with pytest.raises(ConfigError, match="async functions or none"):
        made.on("b")(other)


async def test_a_transaction_of_the_wrong_kind_is_503_and_named_in_the_log(
    shared: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    made = receiver(shared.engine)  # type: ignore[arg-type]
    headers, body = request()
    assert (await post(made, headers, body)).status == 503
    assert "asynccontextmanager" in caplog.text


async def test_synchronous_handlers_do_not_hold_up_the_loop(shared: Ground) -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=shared.engine, consumer="threads")
    loop, meet = asyncio.get_running_loop(), asyncio.Event()

    @made.on("order.*")
    def wait_for_loop(event: Event, connection: Any) -> None:
        asyncio.run_coroutine_threadsafe(meet.wait(), loop).result(10)
        connection.execute(insert(event))

    headers, body = request()
    answering = asyncio.create_task(post(made, headers, body))
    meet.set()
    assert (await asyncio.wait_for(answering, 20)).status == 204
    assert effects(shared, headers) == 1


@pytest.mark.parametrize("error", [StopIteration(), RuntimeError("x")])
async def test_a_synchronous_handler_may_raise_anything(shared: Ground, error: Exception) -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=shared.engine, consumer="raising")

    @made.on("order.*")
    def fail(event: Event, connection: Any) -> None:
        connection.execute(insert(event))
        raise error

    headers, body = request()
    assert (await asyncio.wait_for(post(made, headers, body), 20)).status == 500
    assert effects(shared, headers) == 0


async def test_a_context_manager_that_swallows_exceptions_does_not_count_as_done(shared: Ground) -> None:
    import psycopg

    class Opened:
        def __enter__(self) -> psycopg.Connection:
            self.connection = psycopg.connect(shared.url)
            return self.connection

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            self.connection.rollback()
            self.connection.close()
            return True

    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=Opened, consumer="swallowing")

    @made.on("order.*")
    def fail(event: Event) -> None:
        raise RuntimeError

    headers, body = request()
    assert (await post(made, headers, body)).status == 500


@pytest.mark.parametrize("opens", ["connect", "session"])
async def test_a_block_that_does_not_commit_is_refused_before_it_acknowledges_anything(
    shared: Ground, opens: str, caplog: pytest.LogCaptureFixture
) -> None:
    form = shared.engine.connect if opens == "connect" else lambda: Session(shared.engine)
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=form, consumer="uncommitted")

    @made.on("order.*")
    def effect(event: Event, connection: Any) -> None:
        connection.execute(insert(event))

    headers, body = request()
    assert (await post(made, headers, body)).status == 503
    assert "does not commit" in caplog.text


async def test_a_handler_that_returns_its_work_leaves_no_mark(shared: Ground, engine: AsyncEngine) -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=shared.engine, consumer="returning")

    @made.on("order.*")
    def effect(event: Event, connection: Any) -> Any:
        return asyncio.sleep(0)

    headers, body = request()
    assert (await post(made, headers, body)).status == 500
    assert shared.marks("returning") == 0


# --- mounted, and sent to by a relay ---


async def test_it_is_mounted_or_routed(shared: Ground, engine: AsyncEngine) -> None:
    made = receiver(engine)
    app = Starlette(routes=[StarletteRoute("/routed", made)])
    app.mount("/events", made)
    for path in ("/events/", "/routed"):
        headers, body = request()
        assert (await post(app, headers, body, path=path)).status == 204
        assert effects(shared, headers) == 1
        assert (await post(app, headers, body, path=path, method="GET")).status == 405


async def test_a_relay_sends_and_the_receiver_takes_effect_once(
    shared: Ground, engine: AsyncEngine, fresh_database: Callable[[str], str]
) -> None:
    made = receiver(engine, consumer="relayed")
    failing = ["once"]

    @made.on("order.failing")
    async def fail(event: Event) -> None:
        if failing:
            failing.pop()
            raise RuntimeError("the first time it fails")

    app = Starlette()
    app.mount("/events", made)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/events/"
    books = Destination("books", url, secret=SECRET, allow=["127.0.0.0/8"], backoff={"base": "10ms"})
    outbox = Outbox(fresh_database("postgresql-18"), destinations=[books], routes=[Route("*", to="books")])
    await outbox.amigrate()
    sent = {}
    sender = create_async_engine(driven(outbox.settings.database, ASYNC_DRIVERS))
    async with sender.begin() as connection:
        for event_type in ("order.paid", "order.failing", "customer.moved"):
            sent[event_type] = (await outbox.aemit(connection, "Order", 1, event_type, {})).event_id
    await sender.dispose()
    await outbox.adrain()
    while str(sent["order.failing"]) not in dict(shared.effects()):
        await outbox.adrain()
    found = [event_id for event_id, _ in shared.effects()]
    assert found.count(str(sent["order.paid"])) == 1
    assert found.count(str(sent["order.failing"])) == 1
    assert str(sent["customer.moved"]) not in found
    server.should_exit = True
    await serving


def test_it_is_imported_without_a_web_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfor name in ('starlette', 'uvicorn', 'fastapi'): sys.modules[name] = None\n"
        "import relaybox.contrib.asgi"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
