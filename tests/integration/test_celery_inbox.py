"""Celery tasks that take effect once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from sqlalchemy.orm import Session, sessionmaker

from relaybox import Reject, Retry
from relaybox.contrib.celery import inbox_task
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.integration.consumed import EFFECT, Ground, ground, packed
from tests.waiting import PATIENCE, wait_for


@pytest.fixture(scope="module")
def place(module_database: Callable[[str], str]) -> Iterator[Ground]:
    with ground(module_database("postgresql-18")) as made:
        yield made


@pytest.fixture
def app() -> Celery:
    made = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.update(task_always_eager=True, task_store_eager_result=False)
    return made


def notes(place: Ground, note: str) -> int:
    return [found for _, found in place.effects()].count(note)


def task_of(app: Celery, place: Ground, **options: Any) -> Any:
    @inbox_task(inbox=Inbox(), transaction=sessionmaker(place.engine), app=app, shared=False, **options)
    def index(session: Session, event: Any, error: str | None = None) -> str:
        note = str(event["id"]) if isinstance(event, dict) else event
        session.execute(EFFECT.insert().values(event_id="", note=note))
        if error:
            raise {"retry": Retry("later", after=0), "reject": Reject("never"), "other": OSError("x")}[error]
        return note

    return index


@pytest.mark.parametrize("format", ["json", "flat", "cloudevents"])
def test_an_event_that_is_queued_twice_takes_effect_once(app: Celery, place: Ground, format: str) -> None:
    task = task_of(app, place, consumer=f"test.{format}")
    event_id, envelope = packed(format=format)
    event = msgspec.json.decode(envelope.body)
    results = [task.apply_async([event], task_id=str(uuid4())).get() for _ in range(3)]
    assert results == [str(event_id), None, None]
    assert notes(place, str(event_id)) == 1


def test_a_call_is_known_by_its_id(app: Celery, place: Ground) -> None:
    task = task_of(app, place)
    note, task_id = f"call {uuid4()}", str(uuid4())
    for same in (task_id, task_id, str(uuid4())):
        task.apply_async([note], task_id=same)
    assert notes(place, note) == 2


def test_something_that_has_an_id_is_no_event(app: Celery, place: Ground) -> None:
    task = task_of(app, place)
    order = {"id": str(uuid4()), "total": 42}
    task.delay(order)
    task.delay(order)
    assert notes(place, order["id"]) == 2


@pytest.mark.parametrize(("error", "raised"), [("reject", Reject), ("other", OSError), ("retry", Retry)])
def test_what_fails_leaves_nothing(app: Celery, place: Ground, error: str, raised: type[Exception]) -> None:
    task = task_of(app, place, max_retries=1, consumer="test.failing")
    note, task_id, marks = f"{error} {uuid4()}", str(uuid4()), place.marks("test.failing")
    result = task.apply_async([note, error], task_id=task_id)
    assert isinstance(result.result, raised)
    assert notes(place, note) == 0
    assert place.marks("test.failing") == marks
    assert task.apply_async([note], task_id=task_id).get() == note
    assert notes(place, note) == 1


def test_a_function_that_returns_its_work_fails_and_leaves_no_mark(app: Celery, place: Ground) -> None:
    async def later() -> None: ...

    @inbox_task(inbox=Inbox(), transaction=place.engine, app=app, shared=False, consumer="test.returning")
    def returning(connection: Any) -> Any:
        return later()

    result = returning.delay().result
    assert isinstance(result, ConfigError)
    assert "awaitable" in str(result)
    assert place.marks("test.returning") == 0


def test_a_transaction_that_swallows_the_failure_is_no_success(app: Celery, place: Ground) -> None:
    @contextmanager
    def swallowing() -> Iterator[Any]:
        with suppress(OSError), place.engine.begin() as connection:
            yield connection

    @inbox_task(inbox=Inbox(), transaction=swallowing, app=app, shared=False, consumer="test.swallowing")
    def failing(connection: Any) -> None:
        raise OSError("x")

    result = failing.delay()
    assert result.state == "FAILURE"
    assert "swallowed" in str(result.result)
    assert place.marks("test.swallowing") == 0


def test_a_block_that_does_not_commit_is_refused(app: Celery, place: Ground) -> None:
    @inbox_task(inbox=Inbox(), transaction=place.engine.connect, app=app, shared=False)
    def unwritten(connection: Any) -> None: ...

    assert "does not commit" in str(unwritten.delay().result)


def test_messages_stay_until_the_commit_unless_told_otherwise(app: Celery, place: Ground) -> None:
    task = task_of(app, place)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)
    assert task.name.endswith("index")
    assert task_of(Celery("other", set_as_current=False), place, acks_late=False).acks_late is False


def test_a_worker_runs_it(app: Celery, place: Ground) -> None:
    app.conf.task_always_eager = False
    task = task_of(app, place)
    note, task_id = f"worker {uuid4()}", str(uuid4())
    with start_worker(app, perform_ping_check=False, shutdown_timeout=PATIENCE, loglevel="ERROR"):
        for _ in range(3):
            task.apply_async([note], task_id=task_id)
        last = f"worker {uuid4()}"
        task.delay(last)
        wait_for(lambda: notes(place, last) == 1, "the last task")
    assert notes(place, note) == 1


def test_mistakes_are_told() -> None:
    async def asynchronous(session: Any) -> None: ...

    with pytest.raises(ConfigError, match="async function"):
        inbox_task(inbox=Inbox(), transaction=dict)(asynchronous)
    with pytest.raises(ConfigError, match="transaction = 5"):
        inbox_task(inbox=Inbox(), transaction=5)
