"""Backfills of QuerySets, on the connection and in the transactions of Django."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections, transaction
from django.db.models import Count, F

from relaybox import Outbox
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.outbox import get_outbox
from relaybox.emit.row import Call
from relaybox.errors import ConfigError
from relaybox.search import Source, abackfill, transactions
from relaybox.search.results import Backfilled
from relaybox.search.transactions import Busy
from relaybox.search.workspace import open_rows
from tests.django import steps
from tests.django.shop.models import Order
from tests.django.steps import orders
from tests.waiting import wait_for
from tests.writing import writing

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quiet")]
SECONDS = 60.0

every_order = Order.objects.all()


def place(using: str, count: int) -> None:
    orders(using).bulk_create(Order(total=number) for number in range(count))


def run(using: str, documents: Any, **options: Any) -> Backfilled:
    outbox = get_outbox(using)
    source = documents if isinstance(documents, Source) else Source(documents)

    async def bounded() -> Backfilled:
        async with asyncio.timeout(SECONDS):
            return await abackfill(outbox, "runner", source, **options)

    return asyncio.run(bounded())


def emitted(using: str) -> list[Any]:
    return list(steps.events(using))


def test_every_row_gets_an_event_of_its_own(using: str) -> None:
    place(using, 25)

    done = run(using, orders(using), batch=10)

    assert (done.done, done.total) == (25, 25)
    rows = {str(order.id): order.total for order in orders(using)}
    assert {event.aggregate_id: event.payload["total"] for event in emitted(using)} == rows
    assert len(emitted(using)) == 25
    first = emitted(using)[0]
    assert (first.aggregate_type, first.event_type, first.destination) == ("Order", "order.updated", "runner")
    assert first.headers == {"relaybox-backfill": "true"}


def test_values_and_filters_are_documents_too(using: str) -> None:
    place(using, 9)
    even = orders(using).filter(total__in=[2, 4]).annotate(double=F("total") * 2)

    done = run(using, even.values("id", "double"))

    assert done.done == 2
    assert [event.payload["double"] for event in emitted(using)] == [4, 8]


def test_after_a_stop_it_goes_on(using: str) -> None:
    place(using, 25)
    asked = iter([False, False, True])
    stopped = run(using, orders(using), batch=10, stop=lambda: next(asked))
    assert (stopped.done, stopped.stopped) == (20, True)

    done = run(using, orders(using), batch=10)

    assert done.done == 25
    assert done.resumed_from is not None
    assert len({event.aggregate_id for event in emitted(using)}) == len(emitted(using)) == 25


def writers(using: str, ids: list[int]) -> AbstractContextManager[None]:
    """Threads that change orders, each with its event, until the end of the block."""
    return writing(
        3, lambda chance, number: change(using, chance.choice(ids), number), end=connections.close_all
    )


def change(using: str, id_: int, total: int) -> None:
    with transaction.atomic(using=using):
        orders(using).filter(id=id_).update(total=total)
        payload = {"id": id_, "total": total}
        emit_event("Order", id_, "order.updated", payload, destinations=["runner"], using=using)


def test_beside_live_writers_the_events_in_order_are_the_database(using: str) -> None:
    place(using, 60)
    with writers(using, list(orders(using).values_list("id", flat=True))):
        wait_for(orders(using).filter(total__gte=100_000).exists, "a first change")
        for _ in range(3):
            assert run(using, orders(using), batch=5, max_pending=None).done == 60

    state = {str(order.id): order.total for order in orders(using)}
    assert {event.aggregate_id: event.payload["total"] for event in emitted(using)} == state
    assert any(total >= 100_000 for total in state.values())


def test_some_are_read_by_their_ids_and_repaired(using: str) -> None:
    place(using, 3)
    first = str(orders(using).order_by("id")[0].id)
    outbox = get_outbox(using)

    def repairs(found: Any, missing: Any) -> list[Call]:
        options: Any = {"destinations": ["runner"]}
        return [
            *(Call("Order", item.id, "order.updated", item.payload, **options) for item in found),
            *(Call("Order", id_, "order.deleted", {}, **options) for id_ in missing),
        ]

    async def work() -> tuple[set[str], int, int]:
        async with (
            asyncio.timeout(SECONDS),
            open_rows(outbox, Source(orders(using))) as rows,
        ):
            existing = await rows.existing([first, "x", "999999"])
            repaired = await rows.emit_ids([first, "x", "999999"], repairs)
            return set(existing), repaired, sum([len(page) async for page in rows.read(2)])

    assert asyncio.run(work()) == ({first}, 3, 3)
    found = [(event.aggregate_id, event.event_type) for event in emitted(using)]
    assert found == [(first, "order.updated"), ("x", "order.deleted"), ("999999", "order.deleted")]


@pytest.mark.parametrize("using", ["default", "mariadb"], indirect=True)
def test_while_a_row_is_held_all_others_can_be_changed(using: str) -> None:
    place(using, 30)
    ids = list(orders(using).order_by("id").values_list("id", flat=True))
    done: list[Backfilled] = []
    working = threading.Thread(
        target=lambda: done.append(run(using, orders(using), batch=30, max_pending=None))
    )
    with transaction.atomic(using=using):
        orders(using).filter(id=ids[15]).update(total=7_000)
        working.start()
        in_thread(lambda: wait_for(lambda: str(ids[14]) in {event.aggregate_id for event in emitted(using)}))
        for id_ in (ids[0], ids[14], ids[16], ids[29]):
            in_thread(functools.partial(change, using, id_, 8_000))
        assert done == []
    working.join(SECONDS)

    assert done[0].done == 30
    last = {event.aggregate_id: event.payload["total"] for event in emitted(using)}
    assert [last[str(ids[at])] for at in (15, 16, 29)] == [7_000, 8_000, 8_000]


@pytest.mark.parametrize("using", ["default"], indirect=True)
def test_a_repair_does_not_stand_in_the_way_of_writers_behind_a_long_one(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL lets no other transaction past one that waits for the table, so that must not last."""

    async def pause(seconds: float) -> None:
        await asyncio.to_thread(changed.wait, SECONDS)

    changed = threading.Event()
    monkeypatch.setattr(transactions, "asyncio", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(transactions, "TRIES", 2)
    place(using, 3)
    first, second, _ = orders(using).order_by("id").values_list("id", flat=True)
    errors: list[Exception] = []

    def repair() -> None:
        async def work() -> None:
            async with open_rows(get_outbox(using), Source(orders(using))) as rows:
                await rows.emit_ids(["999999"], lambda _, missing: [])

        try:
            asyncio.run(work())
        except Busy as error:
            errors.append(error)

    working = threading.Thread(target=repair)
    with transaction.atomic(using=using):
        orders(using).filter(id=first).update(total=7_000)
        working.start()
        in_thread(lambda: wait_for(lambda: waits_for_a_table(using)))
        in_thread(lambda: change(using, second, 8_000))
        assert errors == []
        changed.set()
        working.join(SECONDS)

    assert "other transactions hold" in str(errors[0])
    assert [event.aggregate_id for event in emitted(using)] == [str(second)]


def waits_for_a_table(using: str) -> bool:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE mode = 'ShareLock' AND NOT granted")
        return bool(cursor.fetchone()[0])


def in_thread(work: Callable[[], object]) -> None:
    """Run it in a thread, on a connection of its own."""

    def closing() -> None:
        try:
            work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(closing).result(SECONDS)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Source(Order.objects.all()[:3]), "has a slice"),
    (lambda: Source(Order.objects.distinct()), r"has distinct\(\)"),
    (lambda: Source(Order.objects.union(Order.objects.all())), "has a union"),
    (lambda: Source(Order.objects.values("id").annotate(n=Count("total"))), "has an aggregate"),
    (lambda: Source(Order.objects.values_list("id")), r"use values\(\)"),
    (lambda: Source(Order.objects.all(), id="totl"), "no field 'totl'; did you mean 'total'"),
    (lambda: Source(Order.objects.values("total")), "leaves out the documents' ids; add 'id'"),
    (lambda: Source(Order.objects.using("other")), "in the database 'other', the outbox in"),
]


def test_what_cannot_be_a_source_is_refused() -> None:
    for documents, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            run("default", documents())
        assert emitted("default") == []


def test_it_needs_the_outbox_of_the_project() -> None:
    outbox = Outbox("sqlite://", destinations=get_outbox().settings.destinations)

    with pytest.raises(ConfigError, match="needs the project's own outbox"):
        asyncio.run(abackfill(outbox, "runner", Source(every_order)))


command = functools.partial(steps.command, "backfill")


def test_the_command_backfills_a_queryset() -> None:
    place("default", 5)
    words = ("--destination", "runner", "--source", "tests.django.test_backfill:every_order")

    assert command(*words, "--dry-run").startswith("would emit 5 documents to runner\n")
    assert emitted("default") == []
    assert json.loads(command(*words, "--json", "--event-type", "order.seen"))["done"] == 5
    assert {event.event_type for event in emitted("default")} == {"order.seen"}


def test_the_command_says_what_is_wrong() -> None:
    with pytest.raises(CommandError, match="did you mean 'runner'"):
        command("--destination", "runer", "--source", "tests.django.test_backfill:every_order")
    with pytest.raises(CommandError, match=r"it is a class; give its documents: Order\.objects\.all\(\)"):
        command("--destination", "runner", "--source", "tests.django.test_backfill:Order")
