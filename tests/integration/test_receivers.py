"""Webhooks at an ASGI receiver: who is let in, what is run, what is answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
import uvicorn
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute

from relaybox import Destination, Event, Outbox, Reject, Retry, Route, Unavailable
from relaybox.contrib.asgi import Receiver
from relaybox.errors import ConfigError
from relaybox.receive import webhook
from relaybox.receive.inbox import Inbox
from tests.databases import KINDS, async_url
from tests.integration.consumed import OTHER_SECRET, SECRET, Ground, ground, insert, request, signed
from tests.waiting import PATIENCE, await_for


@pytest.fixture(scope="module")
def shared(module_database: Callable[[str], str]) -> Iterator[Ground]:
    """Yield a database that tests share; each looks at its own events."""
    with ground(module_database("postgresql-18")) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Books:
    """A database that tests share, and receivers on it; each test looks at its own events."""

    ground: Ground
    engine: AsyncEngine

    def receiver(self, *, fails: BaseException | None = None, **given: Any) -> Receiver:
        """Make one whose handler leaves an effect, and where another fails the first time."""
        made, errors = self.bare(**given), [fails] if fails else []

        @made.on("order.*")
        async def effect(event: Event, connection: Any) -> None:
            await connection.execute(insert(event))

        @made.on("order.paid")
        async def fail(event: Event) -> None:
            if errors:
                raise errors.pop()

        return made

    def bare(self, **given: Any) -> Receiver:
        """Make one without a handler."""
        options = {"secret": SECRET, "inbox": Inbox(), "transaction": self.engine, "consumer": "books"}
        return Receiver(**(options | given))

    def kept(self) -> tuple[Receiver, list[Event]]:
        """Make one that keeps the events it gets."""
        made, events = self.bare(consumer="kept"), []

        @made.on("*")
        async def keep(event: Event) -> None:
            events.append(event)

        return made, events

    async def outcome(self, made: Any, sent: tuple[dict[str, str], bytes]) -> tuple[int, int]:
        """Post a request; return the status of the answer, and how often the event took effect."""
        answer = await post(made, *sent)
        return answer.status, self.effects(sent[0])

    def effects(self, headers: dict[str, str]) -> int:
        """Return how often the handler of this request took effect."""
        return self.ground.count(headers["webhook-id"])


@pytest.fixture
async def books(shared: Ground) -> AsyncIterator[Books]:
    engine = create_async_engine(async_url(shared.url))
    yield Books(shared, engine)
    await engine.dispose()


Headers = dict[str, str] | list[tuple[str, str]]


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


async def exchange(app: Any, scope: dict[str, Any], incoming: list[Any]) -> list[Any]:
    """Call an ASGI application, and return what it sends."""
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def post(
    app: Any, headers: Headers, body: bytes | list[bytes], *, method: str = "POST", path: str = "/"
) -> Response:
    """Send a request to an ASGI application, the body in these parts."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    parts = [body] if isinstance(body, bytes) else body
    incoming = [
        {"type": "http.request", "body": part, "more_body": n < len(parts)} for n, part in enumerate(parts, 1)
    ]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": encoded}
    scope |= {"query_string": b"", "root_path": ""}
    start, *rest = await exchange(app, scope, incoming)
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(start["status"], found, b"".join(message["body"] for message in rest))


async def test_an_event_is_handled_and_its_repetition_is_acknowledged(books: Books) -> None:
    made, (headers, body) = books.receiver(), request()
    answers = [await post(made, headers, body) for _ in range(3)]
    assert [answer.status for answer in answers] == [204, 204, 204]
    assert answers[0].body == b""
    assert books.effects(headers) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_sixteen_at_once_take_effect_once(kind: str, migrated_database: Callable[[str], str]) -> None:
    with ground(migrated_database(kind)) as place:
        made = Receiver(
            secret=SECRET, inbox=Inbox(), transaction=sessionmaker(place.engine), consumer="books"
        )

        @made.on("order.*")
        def effect(event: Event, session: Session) -> None:
            session.execute(insert(event))

        headers, body = request()
        answers = await asyncio.gather(*(post(made, headers, body) for _ in range(16)))
        statuses = {answer.status for answer in answers}
        # SQLite has one writer; a request that waits for it too long comes again.
        assert 204 in statuses
        assert statuses <= ({204} if kind != "sqlite" else {204, 503, 500})
        assert place.count(headers["webhook-id"]) == 1
        assert place.marks() == 1


async def test_the_session_of_a_sessionmaker_is_given_and_committed(books: Books) -> None:
    made = books.bare(
        inbox=Inbox(consumer="orm"), consumer=None, transaction=async_sessionmaker(books.engine)
    )
    given: list[Any] = []

    @made.on("order.*")
    async def effect(event: Event, session: AsyncSession) -> None:
        given.append(session)
        await session.execute(insert(event))

    assert await books.outcome(made, request()) == (204, 1)
    assert isinstance(given[0], AsyncSession)


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
async def test_the_sender_learns_what_a_handler_raises(
    books: Books, raised: Any, status: int, retry_after: str | None
) -> None:
    made, (headers, body) = books.receiver(fails=raised), request()
    answer = await post(made, headers, body)
    assert (answer.status, answer.headers.get("retry-after")) == (status, retry_after)
    assert answer.detail == raised.reason
    assert books.effects(headers) == 0
    assert await books.outcome(made, (headers, body)) == (204, 1)


@pytest.mark.parametrize("error", [RuntimeError("password=hunter2"), asyncio.CancelledError("hunter2")])
async def test_an_exception_is_500_without_its_text_and_leaves_no_mark(
    books: Books, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    made, (headers, body) = books.receiver(fails=error), request()
    with caplog.at_level(logging.ERROR, "relaybox.consumer"):
        answer = await post(made, headers, body)
    assert answer.status == 500
    assert b"hunter2" not in answer.body
    assert "hunter2" in caplog.text
    assert books.effects(headers) == 0
    assert await books.outcome(made, (headers, body)) == (204, 1)


async def test_a_commit_that_fails_is_500_and_leaves_no_mark(books: Books) -> None:
    async with books.engine.begin() as connection:
        await connection.execute(
            sa.text("CREATE TABLE IF NOT EXISTS late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        )
    made = books.receiver(consumer="late")

    @made.on("order.paid")
    async def collide(event: Event, connection: Any) -> None:
        await connection.execute(sa.text("INSERT INTO late VALUES (1), (1)"))

    assert await books.outcome(made, request()) == (500, 0)
    assert books.ground.marks("late") == 0


async def test_a_database_that_is_away_is_503_and_no_attempt(shared: Ground) -> None:
    away = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none")
    answer = await post(Books(shared, away).receiver(), *request())
    assert answer.status == 503
    assert "127.0.0.1" not in answer.detail
    await away.dispose()


async def test_an_event_that_nobody_takes_is_acknowledged(books: Books) -> None:
    assert await books.outcome(books.receiver(), request("customer.moved")) == (204, 0)


async def test_handlers_are_found_by_patterns_and_all_run(books: Books) -> None:
    made = books.bare(consumer="patterns")
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

    assert (await post(made, *request("order.paid.v2"))).status == 204
    assert called == ["order.paid", "*"]


# --- who is let in ---


@pytest.mark.parametrize("at", [-400, 400])
async def test_a_stale_or_early_timestamp_is_401(books: Books, at: float) -> None:
    headers, body = request(at=at)
    assert (await post(books.receiver(), headers, body)).status == 401
    assert await books.outcome(books.receiver(tolerance="10m"), (headers, body)) == (204, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        *({name: None} for name in ("webhook-id", "webhook-timestamp", "webhook-signature")),
        *({"webhook-signature": text} for text in ("v1,AAAA", "", "v1", "v1,ä")),
        *({"webhook-timestamp": text} for text in ("yesterday", "9" * 40, "-1")),
        {"webhook-id": str(uuid4())},
    ],
)
async def test_a_missing_or_spoilt_header_is_401(books: Books, spoil: dict[str, str | None]) -> None:
    headers, body = request()
    spoilt = {name: value for name, value in (headers | spoil).items() if value is not None}
    answer = await post(books.receiver(), spoilt, body)
    assert answer.status == 401
    assert SECRET not in answer.body.decode()
    assert books.effects(headers) == 0


async def test_another_body_or_another_secret_is_401(books: Books) -> None:
    headers, body = request()
    assert (await post(books.receiver(), headers, body + b" ")).status == 401
    assert await books.outcome(books.receiver(secret=OTHER_SECRET), (headers, body)) == (401, 0)


async def test_an_id_that_stands_there_twice_is_refused(books: Books) -> None:
    headers, body = request()
    pairs = list(headers.items())
    for doubled in ([("webhook-id", str(uuid4())), *pairs], [*pairs, ("Webhook-Id", "x")]):
        answer = await post(books.receiver(consumer="doubled"), doubled, body)
        assert answer.status == 400
        assert "webhook-id" in answer.detail
    assert books.ground.marks("doubled") == 0


async def test_any_of_several_secrets_lets_in(books: Books) -> None:
    made = books.receiver(secret=f"{SECRET} {OTHER_SECRET}")
    for secret in (SECRET, OTHER_SECRET):
        assert await books.outcome(made, request(secret=secret)) == (204, 1)


async def test_a_secret_in_a_file_is_read_again(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "READ_AGAIN_SECONDS", 0)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    made = books.receiver(secret=f"file:{file}")
    headers, body = request(secret=OTHER_SECRET)
    assert (await post(made, headers, body)).status == 401
    file.write_text(f"{OTHER_SECRET}\n")
    assert (await post(made, headers, body)).status == 204
    file.unlink()
    assert (await post(made, *request(secret=OTHER_SECRET))).status == 204
    assert (await post(made, *request())).status == 401


async def test_only_post_is_answered(books: Books) -> None:
    headers, body = request()
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
        answer = await post(books.receiver(), headers, body, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("spoil", "outcome"),
    [
        *(
            ({"content-type": text}, (415, 0))
            for text in ("text/plain", "", "application/x-www-form-urlencoded")
        ),
        ({"content-encoding": "gzip"}, (415, 0)),
        ({"content-type": "Application/JSON; charset=utf-8"}, (204, 1)),
    ],
)
async def test_what_no_event_is_sent_as_is_415(
    books: Books, spoil: dict[str, str], outcome: tuple[int, int]
) -> None:
    headers, body = request()
    assert await books.outcome(books.receiver(), (headers | spoil, body)) == outcome


async def test_a_body_is_read_up_to_its_limit(books: Books) -> None:
    headers, body = request(payload=json.dumps("x" * 2000))
    small = books.receiver(max_body="1KiB")
    announced = await post(small, headers | {"content-length": str(len(body))}, body)
    endless = await post(small, headers, [body[:1000], body[1000:]])
    lying = await post(small, headers | {"content-length": "9" * 30}, b"")
    assert {announced.status, endless.status, lying.status} == {413}
    assert "1,024" in announced.detail
    assert (await post(small, headers | {"content-length": "many"}, body)).status == 400
    assert books.effects(headers) == 0
    assert (await post(books.receiver(max_body=len(body)), headers, [body[:9], b"", body[9:]])).status == 204


async def test_a_request_that_breaks_off_is_not_answered(books: Books) -> None:
    headers, body = request()
    incoming = [{"type": "http.request", "body": body[:5], "more_body": True}]
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "headers": pairs}
    assert await exchange(books.receiver(), scope, incoming) == []


async def test_a_websocket_is_turned_away(books: Books) -> None:
    [answer, *_] = await exchange(books.receiver(), {"type": "websocket"}, [])
    assert answer["type"] == "websocket.close"


# --- what is in it ---


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "payload", ['{"total":42,"data":1}', "[1,2]", '"x"', "null", '{"data":{"a":1}}', "{}"]
)
@pytest.mark.parametrize("format", ["json", "flat", "cloudevents"])
async def test_an_envelope_is_opened(books: Books, format: str, payload: str) -> None:
    made, events = books.kept()
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
async def test_bytes_come_as_bytes(books: Books, format: str) -> None:
    made, events = books.kept()
    given = {"payload": None, "payload_data": b"\0\xff", "payload_encoding": "binary"}
    assert (await post(made, *request(format=format, **given))).status == 204
    assert [event.payload for event in events] == [b"\0\xff"]


async def test_a_bare_payload_has_no_type_and_goes_to_those_who_take_all(books: Books) -> None:
    made, events = books.kept()
    headers, body = request(format="payload")
    assert (await post(made, headers, body)).status == 204
    assert [(event.type, event.payload) for event in events] == [("", {"total": 42})]
    refused = await post(books.receiver(), headers, body)
    assert refused.status == 422
    assert "event type" in refused.detail
    assert books.effects(headers) == 0


EVENT_ID = "6f1c4a52-1f0e-4c53-9d3c-3c8f5c1a7b90"
ENVELOPE = {
    "id": EVENT_ID,
    "type": "order.paid",
    "timestamp": "2026-11-15T06:15:12Z",
    "aggregate_type": "Order",
    "aggregate_id": "7",
    "data": {"hidden": "hunter2"},
}
NO_JSON = (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1e999999}', b'{"a":"\xed\xa0\x80"}')
MALFORMED = (
    ("type", 5),
    ("timestamp", "yesterday"),
    ("timestamp", 5),
    ("aggregate_id", 7),
    ("aggregate_type", None),
)
NO_CLOUDEVENT = (
    *({}, {"specversion": "0.3", "source": "/x"}, {"specversion": "1.0", "id": "other"}),
    *({"specversion": "1.0", "type": None}, {"specversion": "1.0", "data_base64": "%"}),
    {"specversion": "1.0", "time": "noon"},
)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        *(("json", body) for body in NO_JSON),
        *(("json", json.dumps(ENVELOPE | {name: value}).encode()) for name, value in MALFORMED),
        *(("cloudevents+json", json.dumps(ENVELOPE | fields).encode()) for fields in NO_CLOUDEVENT),
    ],
    ids=lambda value: str(value)[:80],
)
async def test_a_body_that_is_not_json_or_not_an_envelope_is_400(
    books: Books, kind: str, body: bytes
) -> None:
    made, events = books.kept()
    answer = await post(made, signed(EVENT_ID, body) | {"content-type": f"application/{kind}"}, body)
    assert answer.status == 400
    assert b"hunter2" not in answer.body
    assert events == []


async def test_an_id_that_is_not_a_uuid_is_400(books: Books) -> None:
    made, events = books.kept()
    answer = await post(made, signed("msg_1", b"{}") | {"content-type": "application/json"}, b"{}")
    assert (answer.status, answer.detail) == (400, "the message's id is not a UUID")
    assert events == []


# --- how it is made ---


def test_mistakes_are_reported_when_a_receiver_is_made() -> None:
    given: dict[str, Any] = {"secret": SECRET, "inbox": Inbox(), "transaction": dict, "consumer": "c"}
    for name, value, message in [
        *(("secret", "", "secret is empty"), ("secret", "env:NO_SUCH_SECRET", "NO_SUCH_SECRET")),
        *(("secret", "whsec_%", "not base64"), ("consumer", None, "consumer is missing")),
        *(("consumer", "", "consumer = ''"), ("transaction", 5, "transaction = 5")),
        *(("tolerance", "soon", "tolerance = 'soon'"), ("max_body", "lots", "max_body = 'lots'")),
    ]:
        with pytest.raises(ConfigError, match=message):
            Receiver(**(given | {name: value}))


def test_handlers_that_cannot_be_are_refused() -> None:
    made = Receiver(secret=SECRET, inbox=Inbox(), transaction=dict, consumer="c")

    def no_parameter() -> None: ...

    def three(event: Event, session: Any, more: Any) -> None: ...

    def yields(event: Event) -> Iterator[None]:
        yield

    functions = {
        no_parameter: "must take an Event",
        three: "must take an Event",
        yields: "yields",
        5: "is not a function that takes an Event",
    }
    for function, message in functions.items():
        with pytest.raises(ConfigError, match=message):
            made.on("order.*")(function)  # type: ignore[type-var]
    for events in ((), (lambda event: None,)):
        with pytest.raises(ConfigError, match="which events"):
            made.on(*events)  # type: ignore[arg-type]

    @made.on("a")
    def one(event: Event) -> None: ...

    async def other(event: Event) -> None: ...

    with pytest.raises(ConfigError, match="async functions or none"):
        made.on("b")(other)


async def test_a_transaction_of_the_wrong_kind_is_503_and_named_in_the_log(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    made = books.receiver(transaction=books.ground.engine)
    assert (await post(made, *request())).status == 503
    assert "asynccontextmanager" in caplog.text


async def test_synchronous_handlers_do_not_hold_up_the_loop(books: Books) -> None:
    made = books.bare(transaction=books.ground.engine, consumer="threads")
    loop, meet = asyncio.get_running_loop(), asyncio.Event()

    @made.on("order.*")
    def wait_for_loop(event: Event, connection: Any) -> None:
        asyncio.run_coroutine_threadsafe(meet.wait(), loop).result(PATIENCE)
        connection.execute(insert(event))

    answering = asyncio.create_task(books.outcome(made, request()))
    meet.set()
    assert await asyncio.wait_for(answering, PATIENCE) == (204, 1)


@pytest.mark.parametrize("error", [StopIteration(), RuntimeError("x"), None])
async def test_a_synchronous_handler_that_raises_or_returns_its_work_leaves_nothing(
    books: Books, error: Exception | None
) -> None:
    made = books.bare(transaction=books.ground.engine, consumer="raising")

    @made.on("order.*")
    def fail(event: Event, connection: Any) -> Any:
        connection.execute(insert(event))
        if error:
            raise error
        return asyncio.sleep(0)

    assert await books.outcome(made, request()) == (500, 0)
    assert books.ground.marks("raising") == 0


async def test_a_context_manager_that_swallows_exceptions_does_not_count_as_done(books: Books) -> None:
    class Opened:
        def __enter__(self) -> psycopg.Connection:
            self.connection = psycopg.connect(books.ground.url)
            return self.connection

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            self.connection.rollback()
            self.connection.close()
            return True

    made = books.bare(transaction=Opened, consumer="swallowing")

    @made.on("order.*")
    def fail(event: Event) -> None:
        raise RuntimeError

    assert (await post(made, *request())).status == 500


@pytest.mark.parametrize("opens", ["connect", "session"])
async def test_a_block_that_does_not_commit_is_refused_before_it_acknowledges_anything(
    books: Books, opens: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = books.ground.engine
    form = engine.connect if opens == "connect" else lambda: Session(engine)
    made = books.bare(transaction=form, consumer="uncommitted")

    @made.on("order.*")
    def effect(event: Event, connection: Any) -> None:
        connection.execute(insert(event))

    assert (await post(made, *request())).status == 503
    assert "does not commit" in caplog.text


# --- mounted, and sent to by a relay ---


async def test_it_is_mounted_or_routed(books: Books) -> None:
    made = books.receiver()
    app = Starlette(routes=[StarletteRoute("/routed", made)])
    app.mount("/events", made)
    for path in ("/events/", "/routed"):
        headers, body = request()
        statuses = [(await post(app, headers, body, path=path, method=it)).status for it in ("POST", "GET")]
        assert (statuses, books.effects(headers)) == ([204, 405], 1)


async def test_a_relay_sends_and_the_receiver_takes_effect_once(
    books: Books, migrated_database: Callable[[str], str]
) -> None:
    made = books.receiver(consumer="relayed", fails=RuntimeError("the first time it fails"))
    app = Starlette()
    app.mount("/events", made)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/events/"
    destination = Destination("books", url, secret=SECRET, allow=["127.0.0.0/8"], backoff={"base": "10ms"})
    database = migrated_database("postgresql-18")
    outbox = Outbox(database, destinations=[destination], routes=[Route("*", to="books")])
    sent = {}
    sender = create_async_engine(async_url(database))
    async with sender.begin() as connection:
        for event_type in ("order.paid", "order.sent", "customer.moved"):
            sent[event_type] = str((await outbox.aemit(connection, "Order", 1, event_type, {})).event_id)
    await sender.dispose()

    async def both() -> bool:
        await outbox.adrain()
        return books.ground.count(sent["order.paid"]) > 0

    await await_for(both, "the second attempt")
    counts = {event_type: books.ground.count(event_id) for event_type, event_id in sent.items()}
    assert counts == {"order.paid": 1, "order.sent": 1, "customer.moved": 0}
    server.should_exit = True
    await serving


def test_it_is_imported_without_a_web_framework() -> None:
    code = (
        "import sys\nfor name in ('starlette', 'uvicorn', 'fastapi'): sys.modules[name] = None\n"
        "import relaybox.contrib.asgi"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
