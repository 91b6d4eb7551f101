"""After a commit: which relays wake, in which thread and on which connection it delivers, what may fail."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import IntegrityError, connections, transaction
from django.test import AsyncClient, Client, override_settings
from django.utils import timezone

from relaybox import Event
from relaybox.contrib.django import drain as draining
from relaybox.contrib.django import emit as emitting
from relaybox.contrib.django import emit_event, tasks
from relaybox.contrib.django.drain import Drained, drain
from relaybox.contrib.django.outbox import get_outbox
from relaybox.contrib.django.tasks import deliver_outbox_events_task
from tests.django import workers
from tests.django.conftest import ALIASES, Live
from tests.django.shop.models import Receipt
from tests.django.steps import NOBODY, eager, events, handled_by, orders, statuses
from tests.django.steps import place as emit_order
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Return the calls that would wake relays: the alias and the rows for ``memory``."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        emitting, "tell", lambda using, rows: calls.append((using, [normal(row) for row in rows["memory"]]))
    )
    return calls


def emit(using: str, number: int = 1) -> str:
    """Emit in the transaction that is open."""
    return normal(emit_event("order", number, "order.placed", {}, using=using).event_id)


def normal(row: object) -> str:
    return str(row).replace("-", "")


def place(using: str = "default", event_type: str = "order.placed") -> None:
    """Write an order with its event."""
    with transaction.atomic(using=using):
        order = orders(using).create(total=1)
        emit_event("order", order.pk, event_type, {}, using=using)


def test_a_transaction_wakes_relays_once(using: str, calls: list[Any]) -> None:
    with transaction.atomic(using=using):
        ids = [emit(using, number) for number in range(3)]
        with transaction.atomic(using=using):
            ids.append(emit(using, 3))
        assert not calls

    assert calls == [(using, ids)]


def test_a_savepoint_that_is_rolled_back_does_not_take_the_hook_along(using: str, calls: list[Any]) -> None:
    with transaction.atomic(using=using):
        with suppress(ZeroDivisionError), transaction.atomic(using=using):
            emit(using)
            raise ZeroDivisionError
        kept = emit(using)

    [(_, rows)] = calls
    assert kept in rows


def test_a_transaction_that_is_rolled_back_wakes_no_relay(using: str, calls: list[Any]) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(using=using):
        emit(using)
        raise ZeroDivisionError
    assert not calls

    with transaction.atomic(using=using):
        second = emit(using)
    assert calls == [(using, [second])]


def test_many_savepoints_cost_no_more_each(using: str, calls: list[Any]) -> None:
    with transaction.atomic(using=using):
        for number in range(20):
            with transaction.atomic(using=using):
                emit(using, number)
        hooks = [hook for hook in connections[using].run_on_commit if isinstance(hook[1], emitting.Dispatch)]
        assert len({id(hook[1]) for hook in hooks}) == 1

    assert len(calls) == 1


def test_transactions_by_hand_have_no_hook_and_nothing_is_lost(using: str, calls: list[Any]) -> None:
    transaction.set_autocommit(False, using=using)
    try:
        emit(using)
        transaction.commit(using=using)
    finally:
        transaction.rollback(using=using)
        transaction.set_autocommit(True, using=using)

    assert not calls
    assert events(using).due().count() == 1


def test_a_broker_that_refuses_is_logged_and_not_asked_again_at_once(
    using: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    publish = tasks._publish
    monkeypatch.setattr(tasks, "REST", 3600.0)
    monkeypatch.setattr(tasks, "_publish", lambda using: (asked.append(using), publish(using)))
    with workers.sending_to(NOBODY):
        for number in range(3):
            emit_order(using, number)

    assert len(asked) == 1
    assert len([record for record in caplog.records if "the next sweep will find" in record.message]) == 1
    assert events(using).due().count() == 3


def test_a_broker_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "ANSWER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with workers.sending_to(f"redis://127.0.0.1:{port}/0"), transaction.atomic():
            emit_order()

    assert "the next sweep will find" in caplog.text
    assert events().due().count() == 1


def test_a_task_that_could_not_be_queued_leaves_no_mark(using: str, broker: str) -> None:
    with workers.sending_to(NOBODY):
        emit_order(using)
    with workers.sending_to(broker), redis.Redis.from_url(broker) as client:
        emit_order(using)
        assert client.llen("celery") == 1


def test_without_celery_relays_are_woken(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[tuple[str, ...]] = []
    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "relay"}):
        monkeypatch.setattr(get_outbox(using), "wake", lambda *names: woken.append(names))
        emit_order(using)

    assert woken == [("memory",)]


@pytest.mark.usefixtures("quiet")
def test_no_relay_is_woken_where_that_is_turned_off(using: str, received: list[Event]) -> None:
    with workers.sending_to(NOBODY):
        emit_order(using)

    assert not received
    assert events(using).due().count() == 1


class Where:
    """A handler that notes where it is called."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.threads: list[int] = []
        self.connections: list[Any] = []
        self.seen: list[bool] = []

    def __call__(self, event: Event) -> None:
        connection = connections[self.using]
        self.threads.append(threading.get_ident())
        # Kept, so that no other can have its place in memory.
        self.connections.append(connection)
        self.seen.append(orders(self.using).filter(pk=event.aggregate_id).exists())

    def assert_here(self) -> None:
        """Check that it was called once in this thread, on its connection, and its event is delivered."""
        assert self.threads == [threading.get_ident()]
        assert self.connections == [connections[self.using]]
        assert (self.seen, statuses(self.using)) == ([True], ["delivered"])


def fail(event: Event) -> None:
    raise ZeroDivisionError("the handler's own")


def test_a_synchronous_view_delivers_in_its_thread_on_its_connection(client: Client) -> None:
    where = Where("default")
    with eager(), handled_by(where):
        response = client.post("/orders/", {"total": "42"})

    assert response.status_code == 201
    where.assert_here()


def test_a_commit_delivers_in_its_thread_on_its_connection(using: str) -> None:
    where = Where(using)
    with eager(), handled_by(where):
        place(using)

    where.assert_here()


async def test_an_asynchronous_view_delivers_where_its_synchronous_calls_are(
    async_client: AsyncClient, tidy: None
) -> None:
    where = Where("default")
    with eager(), handled_by(where):
        response = await async_client.post("/orders/async/", {"total": "42"})

    assert response.status_code == 201
    await sync_to_async(where.assert_here)()


@pytest.mark.parametrize("propagates", [False, True])
def test_a_request_does_not_see_that_a_handler_raised(client: Client, propagates: bool) -> None:
    with eager(propagates=propagates), handled_by(fail):
        response = client.post("/orders/", {"total": "42"})

    assert response.status_code == 201
    row = events().get()
    assert (row.status, row.attempts) == ("pending", 1)
    assert "the handler's own" in row.error_message
    assert row.next_attempt_at > timezone.now()


@pytest.mark.parametrize("propagates", [False, True])
def test_a_commit_does_not_see_that_the_drain_failed(
    using: str, propagates: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise IntegrityError("the drain's own")

    monkeypatch.setattr("relaybox.contrib.django.tasks.drain_rows", broken)
    with eager(propagates=propagates):
        place(using)

    assert statuses(using) == ["pending"]
    assert "1 delivery on " in caplog.text
    assert "the next sweep will find them: IntegrityError: the drain's own" in caplog.text
    assert drain(using).delivered == 1


async def test_where_a_loop_runs_in_this_thread_a_helper_has_its_own_connection(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    where = Where(using)
    with eager(), handled_by(where):
        place(using)

    assert (where.seen, statuses(using)) == ([True], ["delivered"])
    assert where.threads != [threading.get_ident()]
    assert where.connections != [connections[using]]
    assert where.connections[0].connection is None, "the helper's connection was left open"
    # A coroutine has its own, which only it can close.
    connections[using].close()


def test_inside_atomic_nothing_is_delivered_and_a_later_sweep_does_it(
    using: str, received: list[Event]
) -> None:
    with transaction.atomic(using=using):
        emit_event("order", 1, "order.placed", {}, using=using)
        assert drain(using) == Drained(finished=False)
        with eager():
            assert not deliver_outbox_events_task.delay(using=using).get()["finished"]
        assert received == []

    assert drain(using, sweep=True).delivered == 1
    assert len(received) == 1


def test_what_a_handler_emits_is_delivered_too(using: str) -> None:
    def pay(event: Event) -> None:
        with transaction.atomic(using=using):
            emit_event("order", event.aggregate_id, "order.paid", {}, using=using)

    paid: list[Event] = []
    with eager(), handled_by(pay), handled_by(paid.append, "receipts"):
        place(using)

    assert [event.type for event in paid] == ["order.paid"]
    assert statuses(using) == ["delivered", "delivered"]


def test_a_chain_without_an_end_is_cut_off(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(event: Event) -> None:
        clock[0] += 10
        place(using)

    clock = [0.0]
    monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with eager(), handled_by(again), override_settings(OUTBOX={**settings.OUTBOX, "EAGER_SECONDS": 60}):
        place(using)

    assert statuses(using) == ["delivered"] * 6 + ["pending"]


def test_a_handler_that_takes_longer_than_the_request_may_wait_is_not_called_again(using: str) -> None:
    def dawdle(event: Event) -> None:
        calls.append(event.id)
        threading.Event().wait(0.4)

    calls: list[Any] = []
    with eager(), handled_by(dawdle), override_settings(OUTBOX={**settings.OUTBOX, "EAGER_SECONDS": 0.1}):
        # On a busy machine the time may be over before the handler is called.
        wait_for(lambda: place(using) or calls)
        assert events(using).get(event_id=calls[0]).status == "delivered"
        drain(using)

    assert calls.count(calls[0]) == 1


def test_an_asynchronous_handler_uses_the_callers_connection(using: str) -> None:
    async def write(event: Event) -> None:
        order = await orders(using).aget(pk=event.aggregate_id)
        await Receipt.objects.using(using).acreate(event_id=event.id, event_type=str(order.total))
        threads.append(await sync_to_async(threading.get_ident)())

    threads: list[int] = []
    with eager(), handled_by(write):
        place(using)

    assert threads == [threading.get_ident()]
    assert Receipt.objects.using(using).get().event_type == "1"
    assert statuses(using) == ["delivered"]


@pytest.mark.django_db(transaction=False)
def test_an_asynchronous_handler_sees_the_transaction_of_a_test(
    using: str, django_capture_on_commit_callbacks: Any
) -> None:
    async def write(event: Event) -> None:
        assert await orders(using).filter(pk=event.aggregate_id).aexists()

    with eager(), handled_by(write), django_capture_on_commit_callbacks(using=using, execute=True):
        place(using)

    assert statuses(using) == ["delivered"]


@pytest.mark.django_db(transaction=True, databases=ALIASES)
def test_events_of_several_databases_are_delivered_from_each(received: list[Event]) -> None:
    with eager(), transaction.atomic(), transaction.atomic(using="sqlite"):
        place("default")
        place("sqlite")
        with transaction.atomic(using="mariadb"):
            place("mariadb")
        assert len(received) == 1, "the transaction of mariadb has committed"

    assert len(received) == 3
    assert [statuses(alias) for alias in ALIASES] == [["delivered"]] * 3


@pytest.mark.django_db(transaction=True, databases=ALIASES)
def test_a_handler_may_emit_into_another_database(received: list[Event]) -> None:
    def forward(event: Event) -> None:
        place("sqlite")

    with eager(), handled_by(forward, "receipts"):
        place("default", "order.paid")

    assert len(received) == 1
    assert [statuses(alias) for alias in ("default", "sqlite")] == [["delivered"]] * 2


GREEN = """
import asyncio, json, logging, os, sys, threading, time
{patch}
import django
django.setup()
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from sqlalchemy.util import greenlet_spawn
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.drain import drain
from relaybox.contrib.django.models import OutboxEvent
from relaybox.core.event_loop import in_loop
from tests.django.steps import eager, handled_by
from tests.django.shop.models import Order

logging.basicConfig(stream=open(os.devnull, "w"), level=logging.INFO)
using, ours, placing, turns, seen = sys.argv[1], [], [], [], []
spawned, handling, met = [], [], threading.Event()

def handle(event):
    assert Order.objects.using(using).filter(pk=event.aggregate_id).exists()
    handling.append(event)
    if len(handling) > 2:
        met.set()
    if spawned:
        # Until another greenlet delivers too.
        assert met.wait(30)
    assert async_to_sync(own_loop)() == "own"
    assert OutboxEvent.objects.using(using).retry() == 0
    ours.append(connections[using] in placing)
    write()

async def own_loop():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.001)
    return "own" if asyncio.get_running_loop() is loop else "hidden"

async def note(event):
    assert await greenlet_spawn(asyncio.get_running_loop) is asyncio.get_running_loop()
    # It blocks, as a coroutine should not, and so lets other greenlets run.
    write()

def live():
    # The application's own loop, which began before those of deliveries.
    async def walk():
        spawned.append("live")
        while len(ours) < 4:
            assert await own_loop() == "own"
        return "lived"
    spawned.append(asyncio.run(walk()))

def write():
    for _ in range(300):
        logging.info("delivering")
    time.sleep(0.01)

def look():
    while len(ours) < 4:
        for _ in range(300):
            logging.info("looking")
        seen.append(in_loop())
        turns.append(Order.objects.using(using).count())
        time.sleep(0.001)

def place():
    placing.append(connections[using])
    with transaction.atomic(using=using):
        order = Order.objects.using(using).create(total=1)
        emit_event("order", order.pk, "order.placed", {{}}, using=using)
        emit_event("order", order.pk, "order.paid", {{}}, using=using)

GREENLETS = (live, look, place, place, place)
with handled_by(handle), handled_by(note, "receipts"):
    with eager():
        place()
        {spawn}
    with transaction.atomic(using=using):
        inside = drain(using).finished
statuses = list(OutboxEvent.objects.using(using).values_list("status", flat=True))
print(json.dumps([statuses, ours, len(turns) > 1, any(seen), inside, spawned]))
"""
HUBS = {
    "gevent": (
        "import gevent, gevent.monkey; gevent.monkey.patch_all()",
        "gevent.joinall([gevent.spawn(each) for each in GREENLETS], raise_error=True)",
    ),
    "eventlet": (
        "import eventlet; eventlet.monkey_patch()",
        "[thread.wait() for thread in [eventlet.spawn(each) for each in GREENLETS]]",
    ),
}


@pytest.mark.processes
@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("hub", HUBS)
def test_greenlets_deliver_at_once_each_on_its_own_connection_and_see_only_their_own_loops(
    live: Live, hub: str
) -> None:
    patch, spawn = HUBS[hub]
    environment = workers.environment(dict.fromkeys(ALIASES, live.url))
    done = workers.run(environment, "-c", GREEN.format(patch=patch, spawn=spawn), live.using)
    assert done.returncode == 0, done.stderr
    found, ours, others_ran, seen, inside, spawned = json.loads(done.stdout)
    assert (found, ours) == (["delivered"] * 8, [True] * 4)
    assert (others_ran, seen, inside) == (True, False, False)
    assert spawned == ["live", "lived"]
