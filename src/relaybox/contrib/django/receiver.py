"""Receive webhooks in a Django view.

    receiver = Receiver(secret="env:ORDERS_SECRET", consumer="billing")

    @receiver.on("order.*")
    def on_order(event: Event) -> None: ...

    urlpatterns = [path("events/", receiver)]

Handlers run in ``atomic()``, which commits before the response, also under ``ATOMIC_REQUESTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.http import HttpRequest, HttpResponse, UnreadablePostError

from relaybox.contrib.django.inbox import once
from relaybox.core.values import Duration, Secret
from relaybox.errors import ConfigError, shorten
from relaybox.receive.consumer import Consumer, is_asynchronous
from relaybox.receive.webhook import Answer, Refusal, Webhooks, answer, single


class DjangoInbox:
    """An ``Inbox`` for Django's transactions, based on ``relaybox.contrib.django.inbox.once``."""

    consumer: str | None = None

    def once(
        self, connection: Any, message: Any, /, *, consumer: str | None = None
    ) -> AbstractContextManager[bool]:
        """Return a block in the open ``atomic()`` that yields whether the message is new."""
        return once(message, consumer=consumer or "", using=connection.alias)

    def aonce(
        self, connection: Any, message: Any, /, *, consumer: str | None = None
    ) -> AbstractAsyncContextManager[bool]:
        """Raise ``ConfigError``: ``atomic()`` is synchronous."""
        raise ConfigError("Django's transactions are synchronous; make the handlers plain functions")


@contextmanager
def atomic_connection(using: str = DEFAULT_DB_ALIAS) -> Iterator[Any]:
    """Yield Django's connection in ``atomic()``, as the ``transaction`` of a consumer in a Django project."""
    with transaction.atomic(using=using):
        yield connections[using]


class Receiver(Consumer):
    """A view that verifies, deduplicates and handles webhooks, in ``atomic()`` of the database ``using``.

    Handlers are synchronous. The other arguments are those of ``relaybox.contrib.asgi.Receiver``.
    """

    csrf_exempt = True
    """A signature authenticates the request, not a session."""

    def __init__(
        self,
        *,
        secret: str | Secret,
        consumer: str,
        using: str = DEFAULT_DB_ALIAS,
        tolerance: Duration = "5m",
        max_body: str | int = "2MiB",
    ) -> None:
        begin = partial(atomic_connection, using)
        super().__init__(inbox=DjangoInbox(), transaction=begin, consumer=consumer)
        self._webhooks = Webhooks(secret, tolerance, max_body)
        transaction.non_atomic_requests(using=using)(self)

    def _register(self, function: Callable[..., Any], events: tuple[str, ...]) -> None:
        if is_asynchronous(function):
            raise ConfigError(f"on: {shorten(function)} is an async function, which atomic() cannot run in")
        super()._register(function, events)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Handle a request and return the response."""
        given = self._answer(request)
        return HttpResponse(given.body, status=given.status, headers=given.headers)

    def _answer(self, request: HttpRequest) -> Answer:
        try:
            headers = single(request.headers.items())
            self._webhooks.admit(request.method, headers)
            event = self._webhooks.read(headers, self._body(request))
        except Refusal as refusal:
            return refusal.answer
        return answer(self.handle(event))

    def _body(self, request: HttpRequest) -> bytes:
        try:
            # ``request.body`` has its own limit, and relies on the announced length.
            body: bytes = request.read(self._webhooks.max_body + 1)
        except UnreadablePostError:
            raise Refusal(400, "the request ended before its body was complete") from None
        if len(body) > self._webhooks.max_body:
            raise self._webhooks.too_large()
        return body
