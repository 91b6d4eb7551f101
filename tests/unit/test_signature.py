"""Signatures against the reference implementation of Standard Webhooks, and when a secret is read again."""

from __future__ import annotations

import time
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from relaybox.core.values import Secret
from relaybox.errors import ConfigError
from relaybox.receive import webhook
from relaybox.receive.webhook import Refusal, Webhooks
from relaybox.wire.signature import parse_keys, sign, verify
from tests.integration.consumed import OTHER_SECRET, SECRET, request

NOW = 1_738_324_800
BODY = '{"data":"ü"}'.encode()
RAW = b"\x00\xffsecret of bytes"
SYMMETRIC = f"whsec_{b64encode(RAW).decode()}"
SEED = bytes(range(32))
PRIVATE_KEY = Ed25519PrivateKey.from_private_bytes(SEED)
PUBLIC_BYTES = PRIVATE_KEY.public_key().public_bytes_raw()
PRIVATE = f"whsk_{b64encode(SEED).decode()}"
PUBLIC = f"whpk_{b64encode(PUBLIC_BYTES).decode()}"


def signed(secrets: Any, *, at: int = NOW, body: bytes = BODY, message_id: str = "msg_1") -> dict[str, str]:
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": sign(parse_keys(secrets), message_id, at, body),
    }


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SYMMETRIC, SYMMETRIC),
        (SYMMETRIC.rstrip("="),) * 2,
        ("any text", b"text"),
        (f"old {SYMMETRIC}", SYMMETRIC),
    ],
    ids=["padded", "unpadded", "any text", "one of several"],
)
def test_the_reference_verifies_what_we_sign(ours: str, theirs: str | bytes) -> None:
    Webhook(theirs).verify(BODY, signed(ours, at=int(time.time())), json_parse=False)


def test_we_verify_what_the_reference_signs() -> None:
    signature = Webhook(SYMMETRIC).sign("msg_1", datetime.fromtimestamp(NOW, UTC), BODY.decode())
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(NOW), "webhook-signature": signature}
    assert verify(BODY, headers, SYMMETRIC, now=NOW)
    assert verify(BODY.decode(), headers, SYMMETRIC, now=NOW)
    assert not verify(BODY + b" ", headers, SYMMETRIC, now=NOW)


def test_an_example_of_the_specification() -> None:
    # From the reference implementations' own tests.
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert verify(b'{"test": 2432232314}', headers, secret, now=1614265330)


@pytest.mark.parametrize("private", [PRIVATE, f"whsk_{b64encode(SEED + PUBLIC_BYTES).decode()}"])
def test_ed25519_is_verified_with_the_public_key(private: str) -> None:
    headers = signed(private)
    assert headers["webhook-signature"].startswith("v1a,")
    message = b"msg_1.%d.%b" % (NOW, BODY)
    assert headers["webhook-signature"] == f"v1a,{b64encode(PRIVATE_KEY.sign(message)).decode()}"
    assert sign(parse_keys(PUBLIC), "msg_1", NOW, BODY) == "", "a public key signs nothing"
    for secret in (PUBLIC, private):
        assert verify(BODY, headers, secret, now=NOW)
        assert not verify(BODY + b" ", headers, secret, now=NOW)


def test_several_secrets_give_one_signature_each() -> None:
    for secrets in (f"{SYMMETRIC} {PRIVATE} old", [SYMMETRIC, PRIVATE, "old"]):
        headers = signed(secrets)
        kinds = [part.partition(",")[0] for part in headers["webhook-signature"].split(" ")]
        assert kinds == ["v1", "v1a", "v1"]
        for held in (SYMMETRIC, PUBLIC, "old", ["new", "old"]):
            assert verify(BODY, headers, held, now=NOW)
        assert not verify(BODY, headers, "other", now=NOW)


def test_a_list_may_hold_a_secret_with_spaces_and_headers_may_be_in_any_case_and_bytes() -> None:
    assert not verify(BODY, signed(["correct horse"]), "correct horse", now=NOW)
    assert verify(BODY, signed(["correct horse"]), ["correct horse"], now=NOW)
    headers = signed(SYMMETRIC)
    assert verify(BODY, {name.title(): value for name, value in headers.items()}, SYMMETRIC, now=NOW)
    in_bytes = {name.encode(): value.encode() for name, value in headers.items()}
    assert verify(BODY, in_bytes, SYMMETRIC, now=NOW)


@pytest.mark.parametrize(("off", "held"), [(0, True), (300, True), (-300, True), (301, False), (-301, False)])
def test_the_timestamp_may_be_off_by_the_tolerance(off: int, held: bool) -> None:
    assert verify(BODY, signed(SYMMETRIC), SYMMETRIC, now=NOW + off) is held
    assert verify(BODY, signed(SYMMETRIC), SYMMETRIC, tolerance=10_000, now=NOW + off)


GOOD = signed(SYMMETRIC)["webhook-signature"]


@pytest.mark.parametrize(
    "signature",
    [
        "", " ", ",", "v1", "v1,", ",v1", "v1,=", "v1,x", GOOD[:-1], GOOD[:10], GOOD.replace("v1", "v2"),
        GOOD.replace("v1", "v1a"), GOOD.removeprefix("v1,"), GOOD.upper(), f"v1,{GOOD}", f"v1,{'A' * 43}=",
        "v1,ü", "v1,\udcff", "v1,\0", "v1a,AAAA", "ü,ü", "v1,AAAA v1a,AAAA", "v1," * 10_000,
        "v1,AA== " * 10_000, b"\xff\xfe", b"v1,\xff", None, 7, [GOOD], object(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", [SYMMETRIC, PUBLIC])
def test_a_wrong_signature_is_an_answer_and_no_error(signature: Any, secret: str) -> None:
    headers: dict[str, Any] = {**signed(SYMMETRIC), "webhook-signature": signature}
    assert verify(BODY, headers, secret, now=NOW) is False


@pytest.mark.parametrize(
    "timestamp",
    [
        *("", "0", "-1", "x", "1e9", f"{NOW}.0", f"+{NOW}", "９" * 10, "9" * 5000, "nan", "inf", b"\xff"),
        *(None, NOW),
    ],
)
def test_a_wrong_timestamp_is_an_answer_and_no_error(timestamp: Any) -> None:
    headers: dict[str, Any] = {**signed(SYMMETRIC), "webhook-timestamp": timestamp}
    assert verify(BODY, headers, SYMMETRIC, now=NOW) is False


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_an_answer_and_no_error(missing: str) -> None:
    headers = signed(SYMMETRIC)
    del headers[missing]
    assert verify(BODY, headers, SYMMETRIC, now=NOW) is False
    assert verify(BODY, {}, SYMMETRIC, now=NOW) is False


def test_a_good_signature_among_many_bad_ones_counts_up_to_a_limit() -> None:
    headers = signed(SYMMETRIC)
    good = headers["webhook-signature"]
    assert verify(BODY, {**headers, "webhook-signature": f"v1, v1,AAAA v9,x {good}"}, SYMMETRIC, now=NOW)
    assert not verify(BODY, {**headers, "webhook-signature": "v1,AAAA " * 32 + good}, SYMMETRIC, now=NOW)


@given(st.text() | st.binary(), st.text() | st.binary(), st.text() | st.binary())
def test_nothing_in_the_headers_raises(message_id: Any, timestamp: Any, signature: Any) -> None:
    headers = {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": signature}
    assert verify(BODY, headers, [SYMMETRIC, PUBLIC], now=NOW) is False
    assert verify(BODY, {**signed(SYMMETRIC), "webhook-id": message_id}, SYMMETRIC, now=NOW) is (
        message_id in ("msg_1", b"msg_1")
    )


@pytest.mark.parametrize(
    "secret",
    [
        "", " ", [], [""], ["a", ""], "whsec_", "whsec_*secret*", "whsk_", "whsk_c2VjcmV0", "whpk_c2VjcmV0",
        f"whsk_{b64encode(SEED + SEED).decode()}", "ok whsec_*secret*",
    ],
)  # fmt: skip
def test_a_malformed_secret_is_refused_without_showing_it(secret: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(secret)
    assert "c2VjcmV0" not in str(caught.value)
    assert "*" not in str(caught.value)


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
    """Return the list that records what was read, each time."""
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


def test_an_old_message_cannot_be_sent_again_with_its_timestamp_in_the_id() -> None:
    hour = 3600
    headers = signed(SYMMETRIC, at=NOW - hour, body=f"{NOW}.{{}}".encode())
    replayed = {**headers, "webhook-id": f"msg_1.{NOW - hour}", "webhook-timestamp": str(NOW)}
    assert not verify(b"{}", replayed, SYMMETRIC, now=NOW)


def test_an_id_with_a_full_stop_is_refused() -> None:
    assert not verify(BODY, signed(SYMMETRIC, message_id="msg.1"), SYMMETRIC, now=NOW)


MIDNIGHT = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    "both", [f"new-secret {SYMMETRIC} until:2025-12-31", ["new-secret", SYMMETRIC, "until:2025-12-31"]]
)
def test_a_secret_signs_and_verifies_until_its_last_day(both: Any) -> None:
    last, after = MIDNIGHT - 1, MIDNIGHT
    assert len(signed(both, at=last)["webhook-signature"].split()) == 2
    assert len(signed(both, at=after)["webhook-signature"].split()) == 1
    assert verify(BODY, signed(both, at=after), "new-secret", now=after)
    assert verify(BODY, signed(SYMMETRIC, at=last), both, now=last)
    assert not verify(BODY, signed(SYMMETRIC, at=after), both, now=after)


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ("until:2026-01-01", "stands behind no secret"),
        ("new old until:2026-01-01 until:2026-01-02", "stands behind no secret"),
        ("new old until:tomorrow", "is not followed by a date"),
        ("new old until:", "is not followed by a date"),
        ("new old until:9999-12-31", "is not followed by a date"),
        ("old until:2026-01-01", "every secret expires"),
    ],
)
def test_an_expiry_date_that_is_wrong_is_an_error(secret: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(secret)
