"""Tests as users of Django write them: what the outbox shows there, and what is delivered."""

# With the assertions of unittest, as in Django's own documentation.
# ruff: noqa: PT009, PT027

from __future__ import annotations

from datetime import timedelta

from django.db import IntegrityError, transaction
from django.test import TestCase, TransactionTestCase, override_settings

from relaybox import Event
from relaybox.contrib.django import aemit_event, emit_event
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.tasks import (
    cleanup_delivered_outbox_events_task,
    deliver_outbox_events_task,
)
from relaybox.contrib.django.testing import OutboxTestMixin
from relaybox.errors import ConfigError, UnknownDestination
from tests.django.shop.models import Order, Receipt
from tests.django.shop.outbox_handlers import received
from tests.django.steps import eager, handled_by

OTHER = {
    "DESTINATIONS": {"archive": {"sink": "https://archive.example/events"}},
    "ROUTES": {"order.*": ["archive"]},
}


def place(total: int = 42) -> Order:
    """Place an order as a view of the shop does."""
    with transaction.atomic():
        order = Order.objects.create(total=total)
        emit_event("order", order.pk, "order.placed", {"total": total})
    return order


class PlainTests(TestCase):
    """Without anything of Relaybox."""

    def setUp(self) -> None:
        received.clear()

    def test_rows_are_visible_in_the_transaction_of_the_test(self) -> None:
        self.assertFalse(OutboxEvent.objects.exists(), "no row is left of the test before")
        order = place()
        event = OutboxEvent.objects.get()
        self.assertEqual((event.event_type, event.aggregate_id), ("order.placed", str(order.pk)))
        self.assertEqual(event.status, "pending")

    def test_nothing_is_delivered_before_the_commit(self) -> None:
        with eager(), self.captureOnCommitCallbacks() as callbacks:
            place()
        self.assertEqual(len(callbacks), 1)
        self.assertEqual(received, [])
        self.assertEqual(OutboxEvent.objects.get().status, "pending")

    def test_the_tasks_can_be_called(self) -> None:
        place()
        with override_settings(OUTBOX={"DATABASES": ["default"]}):
            self.assertEqual(deliver_outbox_events_task()["delivered"], 1)
            self.assertEqual(cleanup_delivered_outbox_events_task(), 0)
            long_ago = OutboxEvent.objects.get().delivered_at - timedelta(hours=169)
            OutboxEvent.objects.update(delivered_at=long_ago)
            self.assertEqual(cleanup_delivered_outbox_events_task(), 1)
        self.assertFalse(OutboxEvent.objects.exists())

    def test_the_callbacks_deliver_in_the_transaction_of_the_test(self) -> None:
        seen: list[bool] = []

        def handle(event: Event) -> None:
            seen.append(Order.objects.filter(pk=event.aggregate_id).exists())
            Receipt.objects.create(event_id=event.id, event_type=event.type)

        with eager(), handled_by(handle), self.captureOnCommitCallbacks(execute=True):
            place()
        self.assertEqual(seen, [True])
        self.assertEqual(Receipt.objects.get().event_type, "order.placed")
        self.assertEqual(OutboxEvent.objects.get().status, "delivered")

    def test_a_handler_that_raises_leaves_the_transaction_usable(self) -> None:
        def handle(event: Event) -> None:
            order = Order.objects.create(total=1)
            Order.objects.bulk_create([Order(pk=order.pk, total=2)])

        with handled_by(handle):
            for propagates in (False, True):
                with eager(propagates=propagates), self.captureOnCommitCallbacks(execute=True):
                    place(propagates)
        totals = sorted(Order.objects.values_list("total", flat=True))
        self.assertEqual(totals, [0, 1], "what the handlers wrote before they failed is gone")
        rows = OutboxEvent.objects.all()
        self.assertEqual([(event.status, event.attempts) for event in rows], [("pending", 1)] * 2)
        for event in rows:
            self.assertIn(IntegrityError.__name__, event.error_message)


class MixinTests(OutboxTestMixin, TestCase):
    """With ``self.outbox``, in one transaction."""

    def test_what_was_emitted_is_seen_before_any_commit(self) -> None:
        with transaction.atomic():
            order = place()
            self.outbox.assert_emitted("order.placed", aggregate_id=order.pk, payload={"total": 42})
        self.outbox.assert_emitted("order.placed", count=1)
        self.outbox.refute_emitted("order.paid")
        with self.assertRaisesRegex(AssertionError, "no event was emitted that is: order.paid"):
            self.outbox.assert_emitted("order.paid")

    def test_what_is_rolled_back_was_not_emitted(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            place()
            raise ZeroDivisionError
        self.outbox.refute_emitted()
        with self.assertRaisesRegex(AssertionError, "nothing was emitted on 'default' since the test began"):
            self.outbox.assert_emitted()

    def test_functions_are_called_nothing_leaves_and_destinations_fail_as_requested(self) -> None:
        received.clear()
        place()
        emit_event("file", 7, "file.stored", {"name": "a.txt"})
        self.outbox.fail_next("runner", 503)
        drained = self.outbox.drain()
        self.assertEqual((drained.delivered, drained.retried), (1, 1))
        self.assertEqual([event.type for event in received], ["order.placed"])
        self.assertEqual(self.outbox.drain().delivered, 0)
        self.assertEqual(self.outbox.drain(ignore_backoff=True).delivered, 1)
        self.assertEqual([event.payload for event in self.outbox.sent("runner")], [{"name": "a.txt"}])
        [event] = self.outbox.assert_emitted("file.stored")
        self.assertEqual(event.statuses, {"runner": "delivered"})
        self.assertEqual(self.outbox.drain().note, "nothing was due")

    def test_what_a_handler_did_is_there_and_what_a_failed_one_did_is_not(self) -> None:
        emit_event("order", 1, "order.paid", {})
        self.outbox.fail_next("receipts", ValueError("no paper"))
        self.assertEqual(self.outbox.drain().retried, 1)
        self.assertFalse(Receipt.objects.exists())
        self.assertEqual(self.outbox.drain(ignore_backoff=True).delivered, 1)
        self.assertEqual(Receipt.objects.count(), 1)

    def test_a_function_can_be_captured_and_the_tables_be_emptied(self) -> None:
        received.clear()
        memory = self.outbox.capture("memory")
        place()
        self.outbox.drain()
        self.assertEqual((len(memory.events), received), (1, []))
        self.outbox.clear()
        self.assertFalse(OutboxEvent.objects.exists())
        self.outbox.refute_emitted()

    def test_inside_atomic_nothing_is_delivered_and_the_answer_says_so(self) -> None:
        with transaction.atomic():
            place()
            self.assertIn("leave it first", self.outbox.drain().note)
        self.assertEqual(self.outbox.drain().delivered, 1)

    def test_eager_tasks_send_nothing_away_either(self) -> None:
        with eager(), self.captureOnCommitCallbacks(execute=True):
            emit_event("file", 7, "file.stored", {})
        self.assertEqual(len(self.outbox.sent("runner")), 1)

    @override_settings(OUTBOX=OTHER)
    def test_settings_can_be_others_for_a_test(self) -> None:
        place()
        self.assertEqual(self.outbox.drain().delivered, 2)
        self.assertEqual(len(self.outbox.sent("archive")), 1)
        with self.assertRaises(UnknownDestination):
            self.outbox.sent("runner")

    def test_settings_can_be_others_for_a_part_of_a_test(self) -> None:
        with override_settings(OUTBOX=OTHER):
            place()
            self.outbox.assert_emitted("order.placed", destination="archive")
            self.outbox.drain()
        self.assertEqual(self.outbox.drain().delivered, 0)

    async def test_methods_have_asynchronous_counterparts(self) -> None:
        await aemit_event("order", 1, "order.placed", {"total": 1})
        await self.outbox.aassert_emitted("order.placed", aggregate_id=1)
        await self.outbox.arefute_emitted("order.paid")
        self.assertEqual((await self.outbox.adrain()).delivered, 1)
        with self.assertRaisesRegex(ConfigError, "await the method"):
            self.outbox.assert_emitted()
        with self.assertRaisesRegex(ConfigError, "adrain"):
            self.outbox.drain()
        await self.outbox.aclear()
        self.assertFalse(await OutboxEvent.objects.aexists())


class EarlierTests(OutboxTestMixin, TestCase):
    """Events of ``setUpTestData`` are there, and are none of the test's own."""

    @classmethod
    def setUpTestData(cls) -> None:
        place(total=1)

    def test_only_those_of_the_test_count(self) -> None:
        self.outbox.refute_emitted()
        place(total=2)
        self.outbox.assert_emitted(payload={"total": 2}, count=1)
        self.assertEqual(self.outbox.drain().delivered, 2)


class CommittingTests(OutboxTestMixin, TransactionTestCase):
    """With ``self.outbox``, and commits that are real."""

    def test_the_commit_delivers_where_tasks_are_eager(self) -> None:
        self.assertFalse(OutboxEvent.objects.exists(), "tables are empty again")
        received.clear()
        with eager():
            place()
        self.assertEqual(len(received), 1)
        [event] = self.outbox.assert_emitted("order.placed")
        self.assertEqual(event.statuses, {"memory": "delivered"})

    def test_a_drain_delivers_what_is_committed(self) -> None:
        self.assertFalse(OutboxEvent.objects.exists(), "tables are empty again")
        place()
        self.outbox.fail_next("memory", 503)
        self.assertEqual(self.outbox.drain().retried, 1)
        self.assertEqual(self.outbox.drain(ignore_backoff=True).delivered, 1)
