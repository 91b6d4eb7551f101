"""What is secret in payloads, errors and sinks is on no page, and in no answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybox import Destination, Outbox
from relaybox.core.fingerprint import fingerprint
from relaybox.core.redact import DEEP, HIDDEN, Rules, redact, redacted_text
from relaybox.operate.documents import place_of
from relaybox.web import dashboard
from tests.growth import is_linear
from tests.web.stage import HTML, USERS, VIEWER, Stage

RULES = Rules.of(["customer.email", "phone"])


@pytest.mark.parametrize(
    "name",
    ["password", "PASSWORD", "user_password", "client-secret", "X-Api-Key", "apiKey", "accessToken", "card",
     "cardNumber", "IBAN", "ssn", "Authorization", "phone", "Phone", "Set-Cookie", "passwd", "db_pwd",
     "passPhrase", "credentials", "private_key", "cvv", "CVC", "sessionId", "webhook-signature",
     "AWS-Access-Key", "auth", "X-Auth", "PIN", "userPIN", "cardPin", "otp", "OTPCode", "totp_otp", "jwt",
     "idJwt", "pass", "db_pass", "smtpPass"],
)  # fmt: skip
def test_values_of_such_names_are_hidden(name: str) -> None:
    for value in ("x", 5, None, ["x"], {"a": "x"}):
        assert redact({"a": [{name: value}]}, RULES) == {"a": [{name: HIDDEN}]}


@pytest.mark.parametrize("name", ["shipping", "spinner", "author", "passenger", "bypass", "hotpot"])
def test_a_word_within_another_hides_nothing(name: str) -> None:
    assert redact({name: "x"}, RULES) == {name: "x"}
    assert RULES.scrub(f"{name}=x {name}: y") == f"{name}=x {name}: y"


@pytest.mark.parametrize(
    "value",
    [
        [["Authorization", "hush"], ["Accept", "*/*"]],
        {"headers": [("X-Api-Key", "hush")]},
        "amqp://me:hush@host/x",
        "amqp://me:hu@hush@host/x",
        ["see https://me:hush@hooks.example/a"],
        "https://hooks.example/?a=1&access_token=hush",
        "Authorization: Bearer hush",
        "X-Auth: hush",
        "with bearer hush-hush-hush-hush",
        "of eyJhush.eyJhush.hush",
        "pin=hush",
        "otp: 'hush hush'",
    ],
)
def test_a_value_that_says_what_it_is_is_hidden(value: Any) -> None:
    shown = redact({"body": value}, RULES)
    assert "hush" not in str(shown)
    assert HIDDEN in str(shown)


def test_a_path_hides_what_it_leads_to_and_nothing_else() -> None:
    seen = {"email": "a", "customer": {"email": "b", "name": "c"}, "x": {"Customer": [{"email": "d"}]}}
    assert redact(seen, RULES) == {
        "email": "a",
        "customer": {"email": HIDDEN, "name": "c"},
        "x": {"Customer": [{"email": HIDDEN}]},
    }


def test_a_path_is_found_also_where_names_hold_dots() -> None:
    for seen in ({"customer.email": "b"}, {"x": {"a.customer.email": "b"}}, {"x.customer": {"Email": "b"}}):
        assert "b" not in str(redact(seen, RULES)).replace("b.", "")
    for seen in ({"ex-customer.email": "b"}, {"xcustomer": {"email": "b"}}, {"email": "b"}):
        assert redact(seen, RULES) == seen


@pytest.mark.parametrize(
    "text",
    [
        '{"password": "hush"}',
        ' [{"a": {"Customer": {"email": "hush"}}}]',
        '{"a": "{\\"secret\\": \\"hush\\"}"}',
        '{"password": "hush", "cut": "of',
        '{"a": {"pwd": "hush"}, "a": 1}',
        "[" * 50_000 + "hush",
    ],
)
def test_a_document_within_a_text_is_looked_through(text: str) -> None:
    assert "hush" not in str(redact({"body": text}, RULES))
    plain = {"body": '{"order": "17"}', "note": "[sic] {this} stays"}
    assert redact(plain, RULES) == plain


def test_a_field_that_is_an_object_is_known_by_its_name() -> None:
    seen = [{"name": "Password", "value": "hush"}, {"Key": "x-api-key", "values": ["hush"]}]
    assert "hush" not in str(redact(seen, RULES))
    assert "hush" not in str(redact({"customer": [{"field": "email", "Value": "hush"}]}, RULES))
    plain = [{"name": "colour", "value": "red"}, {"name": 5, "value": "x"}]
    assert redact(plain, RULES) == plain


@pytest.mark.parametrize(
    "text",
    [
        "password=hush",
        "401: Authorization: Bearer hush",
        "DB_PASSWORD = 'hush hush'",
        'ValueError: {"api_key": "hush", "a": 1}',
        "cannot connect to amqp://me:hush@host/x",
        "phone: hush",
        "customer.email=hush",
        "X-Access-Key=hush&a=1",
    ],
)
def test_what_a_text_says_behind_such_a_name_is_hidden(text: str) -> None:
    shown = RULES.scrub(text)
    assert "hush" not in shown
    assert HIDDEN in shown


def test_other_texts_stay() -> None:
    for text in ("422: no such order 17", "the token is wrong", "discard: 5", "https://x.org/a@b", "email=a"):
        assert RULES.scrub(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "password",
        "card",
        "token ",
        "//a",
        "://",
        "://a@",
        "password=",
        "p-a-s-s-w-o-r-d",
        "secret:  '",
        "eyJ",
        "eyJa.",
        "-eyJa.b",
        "bearer ",
        "Bearer a",
        "pin",
        "pin-",
        "auth=",
    ],
)
def test_no_text_costs_the_square_of_its_length_to_scrub(piece: str) -> None:
    assert is_linear(lambda size: RULES.scrub(piece * size))


def test_what_cannot_be_looked_through_is_not_shown() -> None:
    assert redacted_text('{"password": "x"', RULES) == HIDDEN
    assert redacted_text("[" * 100_000, RULES) == HIDDEN
    assert redacted_text(None, RULES) is None
    deep: Any = "secret"
    for _ in range(200):
        deep = [deep]
    shown = redact(deep, RULES)
    assert DEEP in str(shown)
    assert "secret" not in str(shown)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_the_shape_stays(value: Any) -> None:
    def shape(seen: Any, shown: Any) -> None:
        if shown == HIDDEN:
            return
        if isinstance(seen, dict):
            assert list(seen) == list(shown)
            for name in seen:
                shape(seen[name], shown[name])
        elif isinstance(seen, list):
            for one, other in zip(seen, shown, strict=True):
                shape(one, other)
        else:
            assert seen == shown

    shape(value, redact(value, RULES))


SAID = "401 Unauthorized: password=hush-hush of amqp://me:hush-hush@host; ticket: hush-hush"


async def test_errors_are_scrubbed_wherever_they_are_shown(quick: Stage) -> None:
    outbox, operated = quick.outbox, quick.operated
    failed = operated.emit("mail")
    operated.emit("web")
    await operated.fail("mail", SAID)
    await operated.store.open_circuit("web", 600.0, SAID)
    await operated.admin.note("test", {"password": "hush-hush", "ticket": "hush-hush", "reason": "why"})
    pages = ["/", "/destinations", "/destinations/mail", "/events", f"/events/{failed}", "/failures"]
    pages += ["/dead-letters", "/operations", "/audit", "/system"]
    documents = ["/api/stats", "/api/destinations", "/api/events", f"/api/events/{failed}", "/readyz"]
    documents += [f"/api/events/{failed}/why", "/api/failures", "/api/dead-letters", "/api/audit"]
    hidden = 0
    async with dashboard(outbox, users=USERS, redact=["ticket"]) as web, quick.client(web=web) as client:
        for path in pages + documents:
            answer = await client.get(path, headers=HTML if path in pages else {})
            assert answer.status_code in (200, 503), (path, answer.text)
            assert "hush-hush" not in answer.text, (path, answer.text)
            hidden += "•••" in answer.text or "\\u2022" in answer.text
    assert hidden >= 10


async def test_no_filter_finds_what_is_hidden(stage: Stage, subtests: pytest.Subtests) -> None:
    outbox, operated = stage.outbox, stage.operated
    operated.emit("mail")
    await operated.fail("mail", "401 at amqp://me:hush-hush@host: password=hush-hush; order unknown")
    operated.emit("web")
    await operated.fail("web", "503 no route")
    other = dashboard(outbox, users=USERS)
    asked = {"hush": 0, "HUSH-": 0, "password=h": 0, "me:hush": 0, "at amqp://": 1, "•": 1, "password=•": 1}
    asked |= {"Order Unknown": 1, "no route": 1, "nothing of it": 0, "50%": 0, "": 2}
    async with other as web, stage.client(VIEWER, web=web) as viewer, stage.client(web=web) as operator:
        for text, count in asked.items():
            with subtests.test(error=text):
                for more in ({}, {"status": "failed"}):
                    query = {"error": text, "limit": 1, **more}
                    found = (await viewer.get("/api/events", params=query)).json()
                    assert len(found["events"]) == min(1, count)
                    # A cursor, as if there were more, would tell that a row has it.
                    assert count > 1 or found["cursor"] is None
                given = {"filter": {"error": text, "status": "failed"}, "dry_run": True}
                counted = (await operator.post("/api/retry", json=given)).json()
                assert counted["retried"] == count
                page = await viewer.get("/events", params={"error": text}, headers=HTML)
                assert ("/events/0" in page.text) is (count > 0)
        groups = (await viewer.get("/api/failures")).json()["failures"]
    # The hash of a group is of what is shown: it does not confirm a guess.
    [group] = [one for one in groups if one["destination"] == "mail"]
    shown = "401 at amqp://•••@host: password=••• order unknown"
    assert group["fingerprint"] == fingerprint("mail", shown).hash


@pytest.mark.parametrize(
    ("sink", "shown"),
    [
        ("https://me:hush@hooks.example:8443/services/T0/B0/hush?a=hush", "https://***@hooks.example:8443"),
        ("kafka://a:1,b:2/topic", "kafka://a:1,b:2"),
        ("console:", "console:"),
        ("handler:shop.tasks", "handler:shop.tasks"),
        ("https://hooks.example?hush", "https://hooks.example"),
    ],
)
def test_of_a_sink_its_scheme_and_its_host_are_shown(sink: str, shown: str) -> None:
    assert place_of(sink) == shown


async def test_the_path_of_a_sink_is_on_no_page(quick: Stage) -> None:
    hook = Destination("hook", "https://hooks.example/services/hush-hush")
    outbox = Outbox(quick.outbox.settings.database, destinations=[hook])
    async with dashboard(outbox, users=USERS) as web, quick.client(web=web) as client:
        for path in ("/destinations", "/destinations/hook", "/api/destinations/hook", "/api/stats"):
            answer = await client.get(path, headers={} if "api" in path else HTML)
            assert "https://hooks.example" in answer.text
            assert "hush-hush" not in answer.text
