"""Receive webhooks in an ASGI application, for example mounted in FastAPI or Starlette.

    receiver = Receiver(secret="env:ORDERS_SECRET", inbox=inbox, transaction=Session)

    @receiver.on("order.*")
    async def on_order(event: Event, session: AsyncSession) -> None: ...

    app.mount("/events", receiver)

A mounted path ends in a slash: the destination's sink is ``https://billing.example/events/``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from relaybox.core.values import Duration, Secret
from relaybox.receive.consumer import Consumer, Once
from relaybox.receive.webhook import Answer, Refusal, Webhooks, answer, single

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Gone(Exception):
    """The sender closed the connection before the request was complete."""


class Receiver(Consumer):
    """An ASGI application that verifies, deduplicates and handles webhooks.

    ``secret`` is the destination's secret, or several separated by spaces. ``tolerance`` is the allowed clock
    difference to the sender, ``max_body`` the largest request. The other arguments are those of ``Consumer``.
    """

    def __init__(
        self,
        *,
        secret: str | Secret,
        inbox: Once,
        transaction: Any,
        consumer: str | None = None,
        tolerance: Duration = "5m",
        max_body: str | int = "2MiB",
    ) -> None:
        super().__init__(inbox=inbox, transaction=transaction, consumer=consumer)
        self._webhooks = Webhooks(secret, tolerance, max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a receiver serves HTTP, not {scope['type']}; mount it in an application")
        try:
            given = await self._answer(scope, receive)
        except _Gone:
            return
        headers = {**given.headers, "content-length": str(len(given.body))} if given.body else given.headers
        lines = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers.items()]
        await send({"type": "http.response.start", "status": given.status, "headers": lines})
        await send({"type": "http.response.body", "body": given.body})

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        try:
            headers = single(
                (name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"]
            )
            self._webhooks.admit(scope["method"], headers)
            event = self._webhooks.read(headers, await self._body(receive))
        except Refusal as refusal:
            return refusal.answer
        return answer(await self.ahandle(event))

    async def _body(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunks.append(message.get("body", b""))
            length += len(chunks[-1])
            if length > self._webhooks.max_body:
                raise self._webhooks.too_large()
            if not message.get("more_body", False):
                return b"".join(chunks)
