"""The project that every other test here relies on."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from relaybox.contrib.django import emit_event
from relaybox.contrib.django.models import OutboxEvent
from tests.django.conftest import URLS, Live
from tests.django.shop.models import Order

VENDORS = {"default": "postgresql", "mariadb": "mysql", "sqlite": "sqlite"}
TABLES = {"shop_order", "outbox_event", "outbox_destination", "outbox_idempotency"}


def test_an_alias_is_the_database_it_says_and_is_migrated(using: str) -> None:
    connection = connections[using]
    assert connection.vendor == VENDORS[using]
    assert set(connection.introspection.table_names()) >= TABLES
    call_command("migrate", database=using, check_unapplied=True, verbosity=0)


def test_a_test_sees_no_other_alias(using: str) -> None:
    other = next((alias for alias in URLS if alias != using), None)
    if other is None:
        pytest.skip("there is no other alias")
    with pytest.raises(AssertionError, match="not allowed"):
        Order.objects.using(other).exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_test_leaves_nothing_behind(using: str, again: bool) -> None:
    assert not Order.objects.using(using).exists()
    Order.objects.using(using).create(total=1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("again", [False, True])
def test_a_test_with_real_commits_leaves_nothing_behind_either(using: str, again: bool) -> None:
    assert not Order.objects.using(using).exists()
    assert not OutboxEvent.objects.using(using).exists()
    committed = []
    with transaction.atomic(using=using):
        Order.objects.using(using).create(total=1)
        emit_event("order", 1, "order.placed", {}, using=using)
        transaction.on_commit(lambda: committed.append(True), using=using)
    assert committed


def test_a_live_database_is_fresh_and_migrated_and_its_commits_are_real(live: Live) -> None:
    assert not Order.objects.using(live.using).exists()
    committed = []
    with transaction.atomic(using=live.using):
        Order.objects.using(live.using).create(total=1)
        transaction.on_commit(lambda: committed.append(True), using=live.using)
    assert committed
    assert str(connections[live.using].settings_dict["NAME"]) in live.url
