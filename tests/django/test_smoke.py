"""The project that every other test here relies on."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from tests.django.conftest import URLS, Live
from tests.django.steps import events, orders, place

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
        orders(other).exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_test_leaves_nothing_behind(using: str, again: bool) -> None:
    assert not orders(using).exists()
    orders(using).create(total=1)


def commit(using: str) -> bool:
    committed = []
    assert not orders(using).exists()
    assert not events(using).exists()
    with transaction.atomic(using=using):
        orders(using).create(total=1)
        place(using)
        transaction.on_commit(lambda: committed.append(True), using=using)
    return bool(committed)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("again", [False, True])
def test_a_test_with_real_commits_leaves_nothing_behind_either(using: str, again: bool) -> None:
    assert commit(using)


@pytest.mark.parametrize("again", [False, True])
def test_a_live_database_is_empty_and_migrated_and_its_commits_are_real(live: Live, again: bool) -> None:
    assert commit(live.using)
    assert str(connections[live.using].settings_dict["NAME"]) in live.url
