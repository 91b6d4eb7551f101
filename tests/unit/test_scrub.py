"""Secrets are hidden in every text, wherever they were read."""

from __future__ import annotations

from base64 import b64encode
from logging import LogRecord

import pytest
from yarl import URL

from relaybox.cli.logs import JsonFormatter, TextFormatter
from relaybox.core import scrub as scrubbing
from relaybox.core.scrub import conceal, scrub
from relaybox.core.settings import Destination
from relaybox.core.values import Secret
from relaybox.operate.observers.log import one_line
from relaybox.sinks.broker import parse_address
from relaybox.sinks.http.sink import read_credentials
from relaybox.sinks.sink import clean, describe


def test_a_secret_is_hidden_once_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "a-token-of-a-user")
    secret = Secret("env:TOKEN")
    assert scrub("a-token-of-a-user") == "a-token-of-a-user"
    secret.reveal()
    assert scrub("no 'a-token-of-a-user'!") == "no '***'!"
    monkeypatch.setenv("TOKEN", "the-next-one")
    secret.reveal()
    assert scrub("a-token-of-a-user, the-next-one") == "***, ***"


@pytest.mark.parametrize(
    "form", ["whsec_AAAAbbbb+/==", "AAAAbbbb+/==", "AAAAbbbb%2B%2F%3D%3D", "s p a c e", "second"]
)
def test_a_secret_is_hidden_in_each_form(form: str) -> None:
    conceal("whsec_AAAAbbbb+/== second", "s%20p%20a%20c%20e")
    assert scrub(f"<{form}>") == "<***>"


def test_of_two_secrets_the_longer_one_is_hidden_whole() -> None:
    conceal("abcdef")
    conceal("abcdefgh")
    assert scrub("abcdefgh abcdef") == "*** ***"


def test_a_short_value_hides_nothing() -> None:
    conceal("", " ", "is", "event")
    assert scrub("this is an event") == "this is an event"


def test_no_more_than_the_latest_secrets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "_MOST", 3)
    conceal(*(f"secret-{number}" for number in range(3)))
    conceal("secret-3")
    assert [scrub(f"secret-{number}") for number in range(4)].count("***") == 3
    assert scrub("secret-3") == "***"


def test_a_broker_s_password_is_hidden_also_as_a_credential() -> None:
    parse_address(Destination("a", "amqp://user:hunter2-p%20w@host/queue"), 5672, {})
    credential = b64encode(b"user:hunter2-p w").decode()
    assert scrub(f"hunter2-p w, hunter2-p%20w, Basic {credential}") == "***, ***, Basic ***"


def test_every_way_out_hides_it() -> None:
    conceal("hunter2-hunter2")
    said = "the password hunter2-hunter2"
    record = LogRecord("relaybox", 30, "", 0, "%s", (said,), None)
    texts = [
        clean(said),
        describe(ValueError(said)),
        one_line(said),
        TextFormatter(colour=False).format(record),
        JsonFormatter().format(record),
    ]
    assert ["the password ***" in text for text in texts] == [True] * 5
    assert not [text for text in texts if "hunter2" in text]


def test_the_path_of_a_secret_url_is_hidden_when_a_receiver_echoes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.example/services/T0/supersecretpath1234")
    read_credentials(
        Destination("hook", "env:HOOK"), URL("https://hooks.example/services/T0/supersecretpath1234")
    )
    assert scrub("404: Cannot POST /services/T0/supersecretpath1234") == "404: Cannot POST ***"
    plain = Destination("plain", "https://hooks.example/events/anothersecretpath99")
    read_credentials(plain, URL(plain.sink))
    assert scrub("404: Cannot POST /events/anothersecretpath99") == "404: Cannot POST /events/***"
