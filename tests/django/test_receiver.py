"""Webhooks at a Django view."""

from __future__ import annotations

import inspect
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections
from django.test import Client
from django.urls import path

from relaybox import Event, Reject, Retry
from relaybox.contrib.django.models import InboxMessage
from relaybox.contrib.django.receiver import Receiver
from relaybox.errors import ConfigError
from tests.django.conftest import ALIASES
from tests.django.steps import orders
from tests.integration.consumed import SECRET, request

pytestmark = pytest.mark.urls(__name__)

RECEIVERS = {
    alias: Receiver(secret=SECRET, consumer="shop", using=alias, max_body="4KiB") for alias in ALIASES
}
urlpatterns = [path(f"{alias}/", receiver) for alias, receiver in RECEIVERS.items()]

fails: list[BaseException] = []


def _register(alias: str) -> None:
    @RECEIVERS[alias].on("order.*")
    def on_order(event: Event) -> None:
        orders(alias).create(total=event.payload["total"])
        if fails:
            raise fails.pop()


for _alias in RECEIVERS:
    _register(_alias)


def post(using: str, headers: dict[str, str], body: bytes, method: str = "POST") -> Any:
    """Send it as a browser without a session would."""
    given = {name: value for name, value in headers.items() if name != "content-type"}
    client = Client(enforce_csrf_checks=True)
    return client.generic(method, f"/{using}/", body, headers["content-type"], headers=given)


@pytest.mark.django_db(transaction=True)
def test_an_event_takes_effect_once(using: str) -> None:
    headers, body = request()
    assert [post(using, headers, body).status_code for _ in range(3)] == [204, 204, 204]
    assert orders(using).count() == 1
    assert InboxMessage.objects.using(using).count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("error", "status"),
    [(Reject("never"), 422), (Retry("later", after=7), 503), (RuntimeError("hunter2"), 500)],
)
def test_what_fails_leaves_nothing(using: str, error: BaseException, status: int) -> None:
    headers, body = request()
    fails.append(error)
    response = post(using, headers, body)
    assert response.status_code == status
    assert response["content-type"] == "application/problem+json"
    assert response.get("retry-after") == ("7" if status == 503 else None)
    assert b"hunter2" not in response.content
    assert not orders(using).exists()
    assert not InboxMessage.objects.using(using).exists()
    assert post(using, headers, body).status_code == 204
    assert orders(using).count() == 1


@pytest.mark.django_db(transaction=True)
def test_the_answer_stands_after_the_commit_under_atomic_requests(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections[using].settings_dict, "ATOMIC_REQUESTS", True)
    nested: list[bool] = []
    receiver = RECEIVERS[using]
    handle = receiver.handle

    def look(event: Event) -> Any:
        nested.append(connections[using].in_atomic_block)
        return handle(event)

    monkeypatch.setattr(receiver, "handle", look)
    headers, body = request()
    assert post(using, headers, body).status_code == 204
    assert nested == [False]


def test_who_is_not_let_in(using: str) -> None:
    headers, body = request()
    assert post(using, headers | {"webhook-id": str(uuid4())}, body).status_code == 401
    assert post(using, headers, body + b" ").status_code == 401
    assert post(using, {"content-type": "application/json"}, body).status_code == 401
    assert post(using, headers | {"content-type": "text/plain"}, body).status_code == 415
    assert post(using, headers, b"x" * 5000).status_code == 413
    assert post(using, *request(at=-400)).status_code == 401
    refused = post(using, headers, body, method="GET")
    assert (refused.status_code, refused["allow"]) == (405, "POST")
    assert not orders(using).exists()


def test_an_async_handler_is_refused() -> None:
    async def handler(event: Event) -> None: ...

    assert inspect.iscoroutinefunction(handler)
    with pytest.raises(ConfigError, match="async function"):
        RECEIVERS["default"].on("x")(handler)
