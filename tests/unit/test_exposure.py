"""What a destination exposes to others: events without TLS, events that anyone may forge, secrets."""

from __future__ import annotations

from typing import Any

import pytest

from relaybox.core.exposure import exposures
from relaybox.core.settings import Destination

TLS, UNSIGNED = "is public and has no TLS", "is public and its events are not signed"


def titles(sink: str, env: dict[str, str] | None = None, **options: Any) -> list[str]:
    found = list(exposures(Destination("d", sink, **options), env or {}))
    assert all(one.detail and one.fix for one in found)
    assert "hush" not in str(found)
    return [one.title.removeprefix("destination 'd' ") for one in found]


@pytest.mark.parametrize("host", ["example.org", "8.8.8.8", "[2606:4700::1111]", "EXAMPLE.org:8080"])
def test_a_public_receiver_wants_tls_and_a_signature(host: str) -> None:
    assert titles(f"http://{host}/events") == [TLS, UNSIGNED]
    assert titles(f"https://{host}/events") == [UNSIGNED]
    for options in ({"secret": "env:SECRET"}, {"auth": "env:TOKEN"}):
        assert titles(f"http://{host}/events", **options) == [TLS]
        assert titles(f"https://{host}/events", **options) == []


@pytest.mark.parametrize(
    ("sink", "options"),
    [
        ("http://127.0.0.1:9000/events", {}),
        ("http://10.0.0.7/events", {}),
        ("http://[::1]/events", {}),
        ("http://runner/events", {}),
        ("http://runner.shop.svc/events", {}),
        ("http://runner.corp.example/events", {"allow": ["10.0.0.0/8"]}),
        ("console:", {}),
        ("kafka://broker.example.org", {}),
        ("http://[::1/events", {}),
    ],
)
def test_nothing_is_said_of_the_own_network(sink: str, options: Any) -> None:
    assert titles(sink, **options) == []


def test_a_secret_belongs_into_a_variable_or_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert titles("console:", secret="hush", auth="hush") == [
        "secret of destination 'd' is a secret in the settings",
        "auth of destination 'd' is a secret in the settings",
    ]
    assert titles("amqp://u:hush@broker/") == ["sink of destination 'd' is a secret in the settings"]
    # Code may read the environment itself.
    assert titles("console:", {"SECRET": "hush"}, secret="hush") == []
    assert titles("console:", secret="env:SECRET", auth="file:/run/secrets/token") == []
    # The URL of Slack is its own secret.
    monkeypatch.setenv("URL", "https://hooks.slack.com/services/hush")
    assert titles("env:URL") == []
    assert titles("env:MISSING") == []
