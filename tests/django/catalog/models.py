"""What the catalog keeps."""

from __future__ import annotations

import uuid

from django.db import models

from relaybox.contrib.django import emits


class Maker(models.Model):
    """Says nothing."""

    name = models.CharField(max_length=50)


@emits(created="product.created", updated="product.updated", deleted="product.deleted")
class Product(models.Model):
    """Says everything."""

    name = models.CharField(max_length=50)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=0)
    stock = models.IntegerField(default=0)
    maker = models.ForeignKey(Maker, models.CASCADE, null=True)
    picture = models.FileField(blank=True)
    seen_at = models.DateTimeField(null=True)
    tags = models.ManyToManyField("Tag")


class Tag(models.Model):
    """Says nothing."""

    word = models.CharField(max_length=50)


class Bargain(Product):
    """The same rows."""

    class Meta:
        proxy = True


class Book(Product):
    """A row here and one there."""

    pages = models.IntegerField()


@emits(created="audiobook.created", deleted="audiobook.deleted", payload=lambda book: {"hours": book.hours})
class Audiobook(Product):
    """Says something of its own, too."""

    hours = models.IntegerField()


@emits(updated="thing.renamed", payload=lambda it: it.name, key=lambda it: it.name, aggregate_type="thing")
class Named(models.Model):
    """No table of its own."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    name = models.CharField(max_length=50)

    class Meta:
        abstract = True


class Shelf(Named):
    """A table for it."""
