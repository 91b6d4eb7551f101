"""Models whose changes are events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core import serializers
from django.db import connections, transaction
from django.db.models import F
from django.test import override_settings

from relaybox.contrib.django import emits
from relaybox.errors import ConfigError, Unrouted
from tests.django.catalog.models import Audiobook, Bargain, Book, Maker, Product, Shelf, Tag
from tests.django.steps import events

OUTBOX = {
    "DISPATCH": "none",
    "DESTINATIONS": {"there": {"sink": "memory:", "ordered": True}},
    "ROUTES": {"product.*": "there", "audiobook.*": "there", "thing.*": "there"},
}


@pytest.fixture(autouse=True)
def _outbox() -> Iterator[None]:
    with override_settings(OUTBOX=OUTBOX):
        yield


def types(using: str) -> list[str]:
    return [event.event_type for event in events(using)]


@pytest.mark.django_db(transaction=True)
def test_a_change_is_an_event_also_outside_atomic(using: str) -> None:
    maker = Maker.objects.using(using).create(name="Acme")
    product = Product(name="Anvil", price="9.50", maker=maker, seen_at=datetime(2026, 1, 2, tzinfo=UTC))
    product.picture.name = "anvil.png"
    product.save(using=using)
    key = str(product.pk)
    product.stock = 3
    product.save()
    product.delete()

    created, updated, deleted = events(using)
    row = {
        "id": int(key),
        "name": "Anvil",
        "price": "9.50",
        "stock": 0,
        "maker_id": maker.pk,
        "picture": "anvil.png",
        "seen_at": "2026-01-02T00:00:00Z",
    }
    assert (created.aggregate_type, created.aggregate_id) == ("Product", key)
    assert types(using) == ["product.created", "product.updated", "product.deleted"]
    assert (created.payload, updated.payload) == (row, {**row, "stock": 3})
    assert (deleted.payload, deleted.aggregate_id) == ({**row, "stock": 3}, key)


@pytest.mark.django_db(transaction=True)
def test_row_and_event_are_rolled_back_together(using: str) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=using):  # noqa: PT012
        Product.objects.using(using).create(name="Anvil")
        raise ZeroDivisionError

    assert (types(using), Product.objects.using(using).count()) == ([], 0)


@pytest.mark.django_db(transaction=True)
def test_a_change_whose_event_is_refused_is_taken_back(using: str) -> None:
    kept = Product.objects.using(using).create(name="Kept")
    with override_settings(OUTBOX={**OUTBOX, "ROUTES": {}}):
        with pytest.raises(Unrouted):
            Product.objects.using(using).create(name="Anvil")
        with pytest.raises(Unrouted):
            kept.delete()
        with transaction.atomic(using=using):
            with pytest.raises(Unrouted):
                Product.objects.using(using).create(name="Anvil")
            Maker.objects.using(using).create(name="Acme")

    assert (types(using), Product.objects.using(using).get().name) == (["product.created"], "Kept")
    assert Maker.objects.using(using).exists()


def test_a_change_that_was_not_written_emits_nothing(using: str) -> None:
    product = Product.objects.using(using).create(name="Anvil", price=Decimal("9.50"))
    product.name, product.stock = "Hammer", F("stock") + 2
    product.save(update_fields=["stock"])
    partly = Product.objects.using(using).only("name").get()
    partly.name = "Tongs"
    partly.save()

    _, counted, renamed = events(using)
    assert (counted.payload["name"], counted.payload["stock"]) == ("Anvil", 2)
    assert (renamed.payload["name"], renamed.payload["price"]) == ("Tongs", "9.50")


def test_of_a_row_that_was_not_loaded_the_known_fields_are_emitted(using: str) -> None:
    Product.objects.using(using).create(name="Anvil")
    Product.objects.using(using).only("name").get().delete()

    assert events(using).last().payload.keys() == {"id", "name"}


def test_querysets_and_cascades_delete_with_events_and_other_bulk_work_has_none(using: str) -> None:
    products = Product.objects.using(using)
    maker = Maker.objects.using(using).create(name="Acme")
    products.bulk_create([Product(name="Anvil", maker=maker), Product(name="Hammer")])
    products.update(stock=1)
    products.bulk_update(products.all(), ["stock"])
    products.first().tags.add(Tag.objects.using(using).create(word="heavy"))
    assert types(using) == []

    maker.delete()
    products.all().delete()
    assert [event.payload["name"] for event in events(using)] == ["Anvil", "Hammer"]
    assert types(using) == ["product.deleted"] * 2


def test_get_or_create_and_update_or_create_are_seen(using: str) -> None:
    products = Product.objects.using(using)
    for price in (1, 2):
        products.get_or_create(name="Anvil", defaults={"price": price})
        products.update_or_create(name="Anvil", defaults={"price": price})

    assert types(using) == ["product.created", "product.updated", "product.updated"]


def test_fixtures_are_no_events(using: str) -> None:
    fixture = '[{"model": "catalog.product", "pk": 7, "fields": {"name": "Anvil", "price": "1.00"}}]'
    for one in serializers.deserialize("json", fixture, using=using):
        one.save(using=using)

    assert (types(using), Product.objects.using(using).count()) == ([], 1)


def test_a_proxy_is_the_same_aggregate(using: str) -> None:
    bargain = Bargain.objects.using(using).create(name="Anvil")
    key = str(bargain.pk)
    Product.objects.using(using).get().save()
    bargain.delete()

    assert types(using) == ["product.created", "product.updated", "product.deleted"]
    assert {(event.aggregate_type, event.aggregate_id) for event in events(using)} == {("Product", key)}


def test_a_child_is_the_same_aggregate_and_says_it_once(using: str) -> None:
    book = Book.objects.using(using).create(name="Smithing", pages=90)
    key = str(book.pk)
    book.delete()
    other = Book.objects.using(using).create(name="Anvils", pages=9)
    Product.objects.using(using).get(pk=other.pk).delete()

    assert types(using) == ["product.created", "product.deleted"] * 2
    created, deleted, *_ = events(using)
    assert {(one.aggregate_type, one.aggregate_id) for one in (created, deleted)} == {("Product", key)}
    assert (created.payload["pages"], "pages" in deleted.payload) == (90, False)
    assert not Book.objects.using(using).exists()


def test_a_child_that_says_something_of_its_own_says_both(using: str) -> None:
    book = Audiobook.objects.using(using).create(name="Smithing", hours=5)
    book.save()
    book.delete()

    assert sorted(types(using)) == sorted(
        ["product.created", "audiobook.created", "product.updated", "product.deleted", "audiobook.deleted"]
    )
    own = [event for event in events(using) if event.event_type.startswith("audiobook")]
    assert [(event.aggregate_type, event.payload) for event in own] == [("Audiobook", {"hours": 5})] * 2


def test_the_models_of_an_abstract_one_emit_what_it_says(using: str) -> None:
    shelf = Shelf.objects.using(using).create(name="Top")
    shelf.name = "Bottom"
    shelf.save()
    shelf.delete()

    (renamed,) = events(using)
    assert (renamed.aggregate_type, renamed.aggregate_id) == ("thing", str(shelf.id or renamed.aggregate_id))
    assert (renamed.payload, renamed.ordering_key) == ("Bottom", "Bottom")


@pytest.mark.django_db(transaction=True)
async def test_asynchronous_code_saves_with_its_events(using: str) -> None:
    product = Product(name="Anvil")
    await product.asave(using=using)

    assert (await events(using).aget()).event_type == "product.created"
    # In the thread that asynchronous code has its connection in.
    await sync_to_async(connections.close_all)()


def test_a_wrong_decorator_is_reported() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "say which changes"),
        ({"created": ""}, "created = ''"),
        ({"deleted": 3}, "deleted = 3"),
        ({"created": "x"}, "is not a model"),
    ]
    for options, said in wrong:
        with pytest.raises(ConfigError, match=said):
            emits(**options)(object)
