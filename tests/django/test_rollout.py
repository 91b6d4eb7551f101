"""Gradual rollout of the routes in ``OUTBOX``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from relaybox import Route
from relaybox.config import Settings
from relaybox.contrib.django import configuration, emit_event, enabled, rollout, shadow
from relaybox.contrib.django.models import OutboxEvent
from relaybox.emit.row import RowBuilder
from relaybox.errors import ConfigError

IN, OUT = 2, 1


@pytest.fixture(autouse=True)
def routes() -> Iterator[None]:
    route: dict[str, Any] = {"events": "file.*", "to": "runner", "rollout": 10}
    with override_settings(OUTBOX={**settings.OUTBOX, "ROUTES": [route]}):
        yield


def emit(using: str, aggregate_id: int) -> tuple[str, ...]:
    return emit_event("file", aggregate_id, "file.added", {}, using=using).destinations


def test_a_share_of_the_aggregates_is_emitted(using: str) -> None:
    assert (emit(using, IN), emit(using, OUT)) == (("runner",), ())
    assert (enabled("runner", IN), enabled("file.*", OUT)) == (True, False)
    assert OutboxEvent.objects.using(using).get().aggregate_id == str(IN)


def test_routes_change_in_this_process_until_there_are_other_settings(using: str) -> None:
    rollout("file.*", 100)
    shadow(Route("file.*", to="runner"), True)
    assert emit(using, OUT) == ("runner",)
    assert not enabled("runner", OUT)
    assert OutboxEvent.objects.using(using).get().headers == {"relaybox-shadow": True}
    shadow("runner", False)
    assert enabled("runner", OUT)
    with override_settings(OUTBOX=settings.OUTBOX):
        assert not enabled("runner", OUT)


def test_a_handler_that_comes_later_changes_nothing(handler: Any) -> None:
    rollout("runner", 100)

    @handler("late.*")
    def on_late(event: Any) -> None:
        raise AssertionError("nothing is delivered")

    assert enabled("runner", OUT)
    assert enabled("late.*", OUT)


def test_a_change_while_another_thread_reads_the_settings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread has read the former routes, and comes to its end after the change."""

    def slowly(given: Settings) -> RowBuilder:
        monkeypatch.setattr(configuration, "RowBuilder", RowBuilder)
        rollout("runner", 100)
        return RowBuilder(given)

    configuration.forget()
    monkeypatch.setattr(configuration, "RowBuilder", slowly)
    configuration.get_configuration()

    assert enabled("runner", OUT)


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'runner'"):
        enabled("runer", 1)
    with pytest.raises(ConfigError, match="rollout = 101"):
        rollout("runner", 101)
