"""The commands about failures, dead letters, audits and test events, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relaybox.core.outcome import Failed
from relaybox.stores.store import DeadLetter, Settlement
from tests.integration.operated import CONFIGURATION, Operated, on, relaybox

pytestmark = pytest.mark.usefixtures("url")


def document(*arguments: object) -> Any:
    return json.loads(relaybox(*arguments, "--json"))


async def fail_some(outbox: Operated) -> None:
    for number in range(4):
        outbox.emit("mail", aggregate_id=number)
    claim = await outbox.claim("mail")
    errors = ["KeyError: 1", "KeyError: 2", "422 No \x1b[2J", "KeyError: 3"]
    settlements = [
        Settlement(one, Failed(error)) for one, error in zip(claim.deliveries, errors, strict=True)
    ]
    await outbox.store.settle(settlements)


def test_failures_are_shown_in_groups_and_retried_by_fingerprint(url: str) -> None:
    on(url, fail_some)
    shown = relaybox("failures")
    assert "\x1b" not in shown
    heading, largest, *_ = shown.splitlines()
    assert heading.split() == ["FINGERPRINT", "COUNT", "DESTINATION", "LAST", "CLASS", "MESSAGE"]
    found = document("failures", "--destination", "mail")
    assert (found["looked_at"], found["capped"]) == (4, False)
    group = found["failures"][0]
    assert (group["count"], group["error_class"], group["event_types"]) == (3, "KeyError", ["order.paid"])
    assert largest.startswith(group["fingerprint"])
    assert f"{group['fingerprint']}, delivery {group['example']}: {group['error']}\n" in shown
    assert group["error"] == "KeyError: 3"
    listed = document("events", "list", "--fingerprint", group["fingerprint"])
    assert len(listed["events"]) == 3
    assert document("retry", "--fingerprint", group["fingerprint"], "--yes", "--rate", "1000")["retried"] == 3
    assert [one["count"] for one in document("failures")["failures"]] == [1]
    rest = document("failures")["failures"][0]["fingerprint"]
    assert document("discard", "--fingerprint", rest, "--yes")["discarded"] == 1
    assert relaybox("failures") == "no delivery has failed\n"


@pytest.mark.parametrize("verb", ["retry", "discard"])
@pytest.mark.parametrize("yes", [(), ("--yes",)], ids=["asked", "not asked"])
def test_a_fingerprint_that_nothing_has_is_a_line_and_status_1(url: str, verb: str, yes: tuple[str]) -> None:
    on(url, fail_some)
    unknown = "relaybox: no failed delivery has the fingerprint 000000000000"
    said = relaybox(verb, "--fingerprint", "000000000000", *yes, status=1)
    assert said == f"{unknown}; see `relaybox failures`\n"
    narrowed = relaybox(verb, "--fingerprint", "000000000000", "--type", "order.paid", *yes, status=1)
    assert narrowed == f"{unknown} and fits the rest of the filter; see `relaybox failures`\n"
    assert document("failures")["looked_at"] == 4


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("failures --destination mial", "no destination is called 'mial'; did you mean 'mail'?"),
        ("retry --all --yes --rate 0", "rate = 0: use rows a second, more than 0"),
        ("events list --fingerprint x --status due", "only failed deliveries have a fingerprint"),
        ("send-test nowhere", "no destination is called 'nowhere'"),
        ("failures --limit 0", ""),
        ("audit --cursor x", ""),
        ("dead-letters --cursor x", ""),
    ],
)
def test_what_cannot_be_is_a_line_and_status_2(command: str, complaint: str) -> None:
    assert complaint in relaybox(*command.split(), status=2)


def test_dead_letters_are_listed_with_their_reasons(url: str, tmp_path: Path) -> None:
    dead = "[destinations.last]\nsink = 'console:'\ndead_letter = 'web'\n"
    (tmp_path / "relaybox.toml").write_text(CONFIGURATION + dead)

    async def give_up(outbox: Operated) -> None:
        outbox.emit("mail")
        [delivery] = (await outbox.claim("mail")).deliveries
        dead_letter = DeadLetter("web", 5, ordered=False)
        await outbox.store.settle([Settlement(delivery, Failed("too\x1b large"))], dead_letter=dead_letter)

    assert relaybox("dead-letters") == "no dead letter\n"
    on(url, give_up)
    shown = relaybox("dead-letters")
    assert "mail" in shown
    assert "\x1b" not in shown
    [letter] = document("dead-letters")["dead_letters"]
    assert (letter["origin"], letter["reason"], letter["destination"]) == ("mail", "too\x1b large", "web")


def test_a_test_event_is_sent_and_on_record() -> None:
    assert relaybox("audit") == "nobody has done anything\n"
    sent = document("send-test", "mail")
    assert "relaybox.test for mail" in relaybox("why", sent["event_id"])
    assert "relaybox why " in relaybox("send-test", "mail")
    audits = document("audit")["audit"]
    assert {one["action"] for one in audits} == {"test"}
    assert audits[-1]["details"] == {"destination": "mail", "event_id": sent["event_id"]}
    page = document("audit", "--limit", "1")
    assert len(page["audit"]) == 1
    assert page["cursor"] == page["audit"][0]["id"]
    assert "more: --cursor" in relaybox("audit", "--limit", "1")
