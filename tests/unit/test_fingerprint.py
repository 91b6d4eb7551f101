"""Errors that differ in nothing but ids and numbers are the same; others are not."""

from __future__ import annotations

import string
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybox.core.fingerprint import KEPT, LOOKED_AT, error_class, fingerprint, normalised
from relaybox.operate.admin import Admin
from relaybox.operate.history import AT_ONCE
from tests.growth import is_linear

WORDS = st.text(string.ascii_letters, min_size=1, max_size=10).filter(lambda word: len(word) < 16)
QUOTED = st.text(string.ascii_letters + string.digits + " -_/", max_size=30)
VARYING = {
    "uuid": st.uuids().map(str),
    "hexadecimal": st.binary(min_size=10, max_size=20).map(bytes.hex),
    "number": st.integers(0, 10**18).map(str),
    "decimal": st.decimals(0, 10**6, places=2).map(str),
    "quoted": QUOTED.map(lambda text: f"'{text}'"),
    "quoted twice": QUOTED.map(lambda text: f'"{text}"'),
    "address": st.ip_addresses(v=4).map(str),
    "time": st.datetimes().map(lambda moment: moment.isoformat()),
    "id": st.integers(0, 10**9).map(lambda number: f"ord_{number}x"),
    "query": st.integers(0, 10**9).map(lambda number: f"https://example.org/a?order={number}&x=y"),
}


@pytest.mark.parametrize("kind", VARYING)
@given(data=st.data())
def test_what_varies_does_not_count(kind: str, data: st.DataObject) -> None:
    before, after = data.draw(st.lists(WORDS, min_size=1)), data.draw(st.lists(WORDS))
    one, other = data.draw(VARYING[kind]), data.draw(VARYING[kind])
    texts = [" ".join([*before, varying, *after]) for varying in (one, other)]
    first, second = (fingerprint("shop", f"ValueError: {text}") for text in texts)
    assert first == second


@given(st.text(), st.text())
def test_whatever_is_written_there_has_a_fingerprint(destination: str, error: str) -> None:
    found = fingerprint(destination, error)
    assert len(found.hash) == 12
    assert int(found.hash, 16) >= 0
    assert found.error_class
    assert len(found.message) <= KEPT
    assert fingerprint(destination, error[:LOOKED_AT]) == found


@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        ("HTTP 422", ["422 Unprocessable Entity: no such field", "Reject: 422 Unprocessable Entity"]),
        ("HTTP 503", ["503 Service Unavailable", "HTTP 503"]),
        ("HTTP 400", ["127.0.0.1:7700: 400 Bad Request: no such field", "[::1]:9200: 400 Bad Request"]),
        ("HTTP 403", ["app-dsn.algolia.net: 403 Forbidden"]),
        ("ValueError", ["ValueError: 422 orders", "ValueError: no such order"]),
        ("NoSuchOrder", ["app.errors.NoSuchOrder: 404", "app.errors.NoSuchOrder: 17"]),
        ("KeyError", ["KeyError"]),
        ("Timeout", ["no answer from example.org:443 within 30s"]),
        ("DNSError", ["DNS knows no address of example.org: nope"]),
        ("TLSError", ["TLS with example.org failed: expired"]),
        ("ConnectionError", ["cannot connect to example.org: refused"]),
        ("RelayDied", ["the relay died 5 times while it held this event"]),
        ("Error", ["127.0.0.1:7700: task 412 was canceled", "127.0.0.1 is away"]),
        ("Error", ["the payload is too large", ""]),
    ],
)
def test_the_class_is_read_from_how_the_error_begins(kind: str, errors: list[str]) -> None:
    assert {fingerprint("shop", error).error_class for error in errors} == {kind}


def test_destination_class_and_text_differ_and_the_message_says_what_is_common() -> None:
    found = [
        fingerprint("shop", "ValueError: no such order 1"),
        fingerprint("mail", "ValueError: no such order 1"),
        fingerprint("shop", "KeyError: no such order 1"),
        fingerprint("shop", "ValueError: no such customer 1"),
        fingerprint("shop", "422 Unprocessable Entity"),
        fingerprint("shop", "400 Unprocessable Entity"),
        fingerprint("shop", None),
    ]
    assert len({one.hash for one in found}) == len(found)
    order = "0197f3c5-5d0e-7bb2-a8a6-4f1f5a4e2a11"
    error = f"ValueError: order {order} of 'Ann' at https://x.example/a?b=c  is not paid"
    message = "ValueError: order # of '…' at https://x.example/a is not paid"
    assert fingerprint("shop", error).message == message
    assert fingerprint("shop", "409 Conflict: order 17").message == "409 Conflict: order #"
    assert fingerprint("shop", "HTTP 503").message == "503"
    assert fingerprint("shop", "4221 rows").message == "# rows"
    assert fingerprint("shop", "422-17 is gone") == fingerprint("shop", "422-18 is gone")
    one, other = (
        fingerprint("shop", f"{host}:9200: 400 Bad Request: field 7") for host in ("one", "two.org")
    )
    assert one == other
    assert one.message == "400 Bad Request: field #"


@pytest.mark.parametrize(
    "piece",
    ["?", "?a", "?=", "=?", "'", "'a", "\"a", "`", "a1-", "a.", "A.", "1", "f", "f-", " ", "\t", " within 1",
     "0f1-", "took longer than", "a", "1.", "x'", "1:1", ":1: "],
)  # fmt: skip
def test_no_text_costs_the_square_of_its_length(piece: str) -> None:
    for text in ("{}", "{}!", "A{}\n"):
        for read in (normalised, error_class):
            assert is_linear(lambda size: read(text.format(piece * size))), (text, read)  # noqa: B023


async def test_many_rows_are_grouped_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Ledger:
        rows = 0

        async def failed_rows(self, destination: str | None, most: int) -> tuple[list[None], bool]:
            return [None] * self.rows, False

    def grouped(rows: object, capped: bool, limit: int) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr("relaybox.operate.history.group_failures", grouped)
    service = SimpleNamespace(
        _ledger=SimpleNamespace(history=Ledger()), _configured=SimpleNamespace(check_known=AsyncMock())
    )
    for Ledger.rows in (AT_ONCE, AT_ONCE + 1):
        await Admin.failures(service)  # type: ignore[arg-type]
    assert [one is threading.main_thread() for one in threads] == [True, False]
