"""Views that place orders, as a user would write them."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from relaybox.contrib.django import emit_event
from tests.django.shop.models import Order


@transaction.atomic
def place(request: HttpRequest) -> HttpResponse:
    """Place an order and say so."""
    order = order_of(request)
    return HttpResponse(str(order.pk), status=201)


async def aplace(request: HttpRequest) -> HttpResponse:
    """Do the same in an asynchronous view."""
    order = await sync_to_async(transaction.atomic(order_of))(request)
    return HttpResponse(str(order.pk), status=201)


def order_of(request: HttpRequest) -> Order:
    order = Order.objects.create(total=int(request.POST["total"]))
    emit_event("order", str(order.pk), "order.placed", {"total": order.total})
    return order
