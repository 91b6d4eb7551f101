"""When a receiver reads its secret again."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from relaybox import webhook
from relaybox.setting import Secret
from relaybox.webhook import Refusal, Webhooks
from tests.integration.consumed import OTHER_SECRET, SECRET, request


class Clock:
    """One that stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(webhook.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read, each time."""
    found: list[str] = []
    reveal = Secret.reveal

    def noted(self: Secret) -> str:
        found.append(reveal(self))
        return found[-1]

    monkeypatch.setattr(Secret, "reveal", noted)
    return found


def refused(webhooks: Webhooks, headers: dict[str, str], body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        webhooks.read(headers, body)
    assert caught.value.answer.status == 401


def test_bad_signatures_have_the_secret_read_once_a_second(reads: list[str], clock: Clock) -> None:
    webhooks = Webhooks(SECRET, "5m", "2MiB")
    headers, body = request(secret=OTHER_SECRET)
    for _ in range(100):
        refused(webhooks, headers, body)
    assert len(reads) == 2
    clock.now = 1.0
    refused(webhooks, headers, body)
    refused(webhooks, headers, body)
    assert len(reads) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        {"webhook-timestamp": "1"},
        {"webhook-timestamp": "yesterday"},
        {"webhook-id": None},
        {"webhook-timestamp": None},
        {"webhook-signature": None},
    ],
)
def test_what_no_secret_would_let_in_has_none_read(reads: list[str], spoil: dict[str, str | None]) -> None:
    webhooks = Webhooks(SECRET, "5m", "2MiB")
    headers, body = request()
    given = {name: value for name, value in (headers | spoil).items() if value is not None}
    refused(webhooks, given, body)
    assert len(reads) == 1


def test_a_secret_that_was_replaced_is_found_within_a_second(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    webhooks = Webhooks(f"file:{file}", "5m", "2MiB")
    refused(webhooks, *request(secret=OTHER_SECRET, event_id=uuid4()))
    file.write_text(OTHER_SECRET)
    headers, body = request(secret=OTHER_SECRET)
    refused(webhooks, headers, body)
    clock.now = 1.0
    assert str(webhooks.read(headers, body).id) == headers["webhook-id"]
