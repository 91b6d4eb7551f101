"""Every endpoint of the API, with what it is for, on a real database."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox.stores.ledger import Counted
from tests.waiting import await_for
from tests.web.stage import Stage


async def test_stats_say_where_everything_is(stage: Stage) -> None:
    stage.operated.emit("mail")
    stage.operated.emit("shop", aggregate_id=2)
    await stage.operated.fail("shop")
    stage.operated.beat()
    stats = await stage.get("/api/stats")
    expected = {"pending": 1, "processing": 0, "completed": 0, "failed": 1, "capped": []}
    assert {name: stats[name] for name in expected} == expected
    assert datetime.fromisoformat(stats["oldest_pending"]).utcoffset() == timedelta(0)
    assert stats["oldest_pending_seconds"] >= 0
    assert [one["name"] for one in stats["destinations"]] == ["mail", "shop", "spare", "web"]
    assert [relay["alive"] for relay in stats["relays"]] == [True]
    assert (await stage.get("/api/relays"))["relays"] == stats["relays"]


async def test_events_are_listed_newest_first_and_page_by_page(stage: Stage) -> None:
    ids = [str(stage.operated.emit("mail", aggregate_id=number)) for number in range(5)]
    await stage.operated.fail("mail", limit=3)
    first = await stage.get("/api/events", limit=2)
    second = await stage.get("/api/events", limit=2, cursor=first["cursor"])
    # A page may be of another length, and the cursor is of the same list.
    third = await stage.get("/api/events", limit=500, cursor=second["cursor"])
    seen = [event["id"] for page in (first, second, third) for event in page["events"]]
    assert seen == ids[::-1]
    assert third["cursor"] is None
    failed = await stage.get("/api/events", status="failed", limit=50)
    assert [event["id"] for event in failed["events"]] == ids[2::-1]
    assert {event["state"] for event in failed["events"]} == {"failed"}


@pytest.mark.parametrize("status", ["processing", "sending"])
async def test_what_is_being_sent_has_two_names(quick: Stage, status: str) -> None:
    quick.operated.emit("mail")
    await quick.operated.claim("mail")
    [event] = (await quick.get("/api/events", status=status))["events"]
    assert (event["status"], event["state"], event["lease_owner"]) == ("pending", "sending", "relay-1")


@pytest.mark.parametrize("status", ["completed", "delivered"])
async def test_what_is_delivered_has_two_names(quick: Stage, status: str) -> None:
    quick.operated.emit("mail")
    await quick.operated.deliver("mail")
    [event] = (await quick.get("/api/events", status=status))["events"]
    assert event["state"] == "delivered"


async def test_every_filter_finds_what_it_names_and_nothing_else(stage: Stage) -> None:
    stage.operated.emit("mail", aggregate_id=1, event_type="order.lost")
    id_ = stage.operated.emit("shop", aggregate_id="a b/ü", event_type="order.paid", key="k&1")
    await stage.operated.fail("shop", "boom 422")
    now = datetime.now(UTC)
    filters = {"status": "failed", "destination": "shop", "event_type": "order.paid", "error": "BOOM"}
    filters |= {"aggregate_id": "a b/ü", "ordering_key": "k&1", "event_id": str(id_)}
    for name, value in filters.items():
        events = (await stage.get("/api/events", **{name: value}))["events"]
        assert [event["id"] for event in events] == [str(id_)], name
    for since in ("1h", (now - timedelta(hours=1)).isoformat(), "2020-01-01"):
        assert len((await stage.get("/api/events", since=since))["events"]) == 2, since
    assert (await stage.get("/api/events", since="2999-01-01T00:00:00Z"))["events"] == []
    until = (now - timedelta(hours=1)).isoformat().replace("+", " ")
    assert (await stage.get("/api/events", until=until))["events"] == []


async def test_an_event_is_shown_with_all_that_is_known_of_it_and_no_secret(stage: Stage) -> None:
    payload = {"total": 42, "card": {"number": "4111"}, "lines": [{"api_key": "k"}, {"price": 1}]}
    id_ = stage.operated.emit("mail", "shop", payload=payload, headers={"X-Auth-Token": "t", "tenant": "a"})
    await stage.operated.back_off("mail", "503 <img src=x onerror=alert(1)>")
    found = (await stage.get(f"/api/events/{id_}"))["deliveries"]
    assert [one["destination"] for one in found] == ["mail", "shop"]
    assert found[0]["payload"] == {"total": 42, "card": "•••", "lines": [{"api_key": "•••"}, {"price": 1}]}
    assert found[0]["headers"] == {"X-Auth-Token": "•••", "tenant": "a"}
    [attempt] = found[0]["failed_attempts"]
    assert attempt["error_message"] == "503 <img src=x onerror=alert(1)>"
    assert (await stage.get(f"/api/events/{found[1]['id']}"))["deliveries"] == [found[1]]


async def test_a_binary_payload_is_shown_by_its_size(quick: Stage) -> None:
    id_ = quick.operated.emit("mail", payload=b"\x00\xffsecret")
    [found] = (await quick.get(f"/api/events/{id_}"))["deliveries"]
    assert (found["payload"], found["payload_size"], found["payload_encoding"]) == (None, 8, "binary")


async def test_why_is_answered_for_each_delivery(stage: Stage) -> None:
    first = stage.operated.emit("shop")
    second = stage.operated.emit("shop")
    await stage.operated.fail("shop", "422 refused", limit=1)
    [reason] = (await stage.get(f"/api/events/{second}/why"))["deliveries"]
    assert reason["why"] == "parked"
    assert (reason["behind"]["event_id"], reason["behind"]["why"]) == (str(first), "failed")
    assert "422 refused" in reason["text"]


async def test_a_retry_starts_failed_deliveries_again(stage: Stage) -> None:
    ids = [stage.operated.emit("mail", aggregate_id=number) for number in range(3)]
    await stage.operated.fail("mail")
    counted = await stage.post("/api/retry", {"filter": {"destination": "mail"}, "dry_run": True})
    assert (counted["retried"], counted["dry_run"]) == (3, True)
    assert stage.operated.row(ids[0]).status == "failed"
    unknown = str(UUID(int=9))
    done = await stage.post("/api/retry", {"ids": [str(ids[0]), unknown]})
    assert done == {"retried": 1, "skipped": 0, "unknown": [unknown], "dry_run": False, "capped": False}
    # Without a word, all that failed is meant.
    assert (await stage.post("/api/retry"))["retried"] == 2
    rows = [stage.operated.row(id_) for id_ in ids]
    assert {(row.status, row.attempts, row.error_message) for row in rows} == {("pending", 0, None)}
    assert {actor for actor, *_ in stage.operated.audit()} == {"ann"}


async def test_a_replay_and_a_discard_must_name_the_events(stage: Stage) -> None:
    id_ = stage.operated.emit("mail")
    await stage.operated.deliver("mail")
    for action in ("replay", "discard"):
        for nothing in ({}, {"filter": {}}, {"dry_run": True}):
            answer = await stage.post(f"/api/{action}", nothing, 422)
            assert "Say which" in answer["detail"]
    assert (await stage.post("/api/replay", {"ids": [str(id_)], "to": "web"}))["replayed"] == 1
    assert (await stage.post("/api/replay", {"all": True}))["replayed"] == 1
    assert len(stage.operated.rows()) == 3
    waiting = {"filter": {"destination": "web", "status": "pending"}}
    assert (await stage.post("/api/discard", waiting))["discarded"] == 1


async def test_an_id_is_narrowed_by_a_destination(quick: Stage) -> None:
    id_ = quick.operated.emit("mail", "web")
    narrowed = {"ids": [str(id_)], "filter": {"destination": "web"}}
    assert (await quick.post("/api/discard", narrowed))["discarded"] == 1
    assert [row.status for row in quick.operated.rows()] == ["pending", "discarded"]


async def test_a_move_gives_rows_to_another_destination(stage: Stage) -> None:
    stage.operated.emit("gone")
    counted = await stage.post("/api/move", {"from": "gone", "to": "mail", "dry_run": True})
    assert counted["moved"] == 1
    assert (await stage.post("/api/move", {"from": "gone", "to": "mail"}))["moved"] == 1
    assert [row.destination for row in stage.operated.rows()] == ["mail"]


async def ended(stage: Stage, id_: str) -> Any:
    """Return the operation when it no longer runs."""

    async def found() -> Any:
        operation = await stage.get(f"/api/operations/{id_}")
        return None if operation["state"] == "running" else operation

    return await await_for(found)


async def test_a_bulk_action_goes_on_in_the_background_and_is_on_record(stage: Stage) -> None:
    for number in range(4):
        stage.operated.emit("mail", aggregate_id=number)
    await stage.operated.fail("mail")
    async with stage.client() as client:
        body = {"filter": {"destination": "mail"}, "background": True}
        begun = await client.post("/api/retry", json=body)
        assert begun.status_code == 202
        document = begun.json()
        assert begun.headers["location"] == f"/api/operations/{document['id']}"
        assert (document["action"], document["actor"], document["total"]) == ("retry", "ann", 4)
    found = await ended(stage, document["id"])
    assert (found["state"], found["done"], found["error"]) == ("done", 4, None)
    assert (await stage.get("/api/operations"))["operations"] == [found]
    assert await stage.post(f"/api/operations/{found['id']}/cancel") == {"cancelled": False}
    assert {row.status for row in stage.operated.rows()} == {"pending"}


async def test_what_cannot_be_counted_is_not_awaited(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.operated.emit("mail")
    await quick.operated.fail("mail")

    async def capped(*_: object, **__: object) -> Counted:
        return Counted(10_000, True)

    monkeypatch.setattr("relaybox.operate.admin_actions.AdminActions.count", capped)
    assert (await quick.post("/api/retry", {}, 202))["capped"] is True


async def test_a_running_bulk_action_can_be_cancelled(stage: Stage) -> None:
    for number in range(3):
        stage.operated.emit("mail", aggregate_id=number)
    await stage.operated.fail("mail")
    begun = await stage.post("/api/retry", {"background": True, "rate": 0.1}, 202)
    assert (await stage.get(f"/api/operations/{begun['id']}"))["state"] in ("running", "done")
    await stage.post(f"/api/operations/{begun['id']}/cancel")
    assert (await ended(stage, begun["id"]))["state"] in ("cancelled", "done")


async def test_failures_are_grouped(stage: Stage) -> None:
    for number in range(3):
        stage.operated.emit("mail", aggregate_id=number)
        await stage.operated.fail("mail", f"422 order {number} is unknown")
    found = await stage.get("/api/failures", destination="mail")
    [group] = found["failures"]
    assert (group["count"], group["destination"], group["event_types"]) == (3, "mail", ["order.paid"])
    assert (found["looked_at"], found["capped"]) == (3, False)
    retried = await stage.post("/api/retry", {"filter": {"fingerprint": group["fingerprint"]}})
    assert retried["retried"] == 3


async def test_destinations_are_paused_and_resumed_and_tested(stage: Stage) -> None:
    paused = await stage.post("/api/destinations/mail/pause", {"reason": "theirs", "until": "2h"})
    assert (paused["destination"], paused["paused"], paused["reason"]) == ("mail", True, "theirs")
    ahead = datetime.fromisoformat(paused["until"]) - datetime.now(UTC)
    assert timedelta(minutes=119) < ahead <= timedelta(hours=2)
    found = await stage.get("/api/destinations/mail")
    assert (found["paused"]["by"], found["paused"]["reason"], found["sink"]) == ("ann", "theirs", "console:")
    assert found in (await stage.get("/api/destinations"))["destinations"]
    assert await stage.post("/api/destinations/mail/resume") == {"destination": "mail", "resumed": True}
    assert await stage.post("/api/destinations/mail/resume", {}) == {"destination": "mail", "resumed": False}
    tested = await stage.post("/api/destinations/mail/test")
    [event] = (await stage.get(f"/api/events/{tested['event_id']}"))["deliveries"]
    assert (event["event_type"], event["destination"]) == ("relaybox.test", "mail")


async def test_the_audit_is_listed_page_by_page(stage: Stage) -> None:
    for _ in range(3):
        await stage.post("/api/destinations/mail/pause")
    first = await stage.get("/api/audit", limit=2)
    second = await stage.get("/api/audit", limit=2, cursor=first["cursor"])
    rows = [*first["audit"], *second["audit"]]
    assert [row["action"] for row in rows] == ["pause"] * 3
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)
    assert {row["actor"] for row in rows} == {"ann"}


async def test_series_and_dead_letters_answer_on_an_empty_outbox(stage: Stage) -> None:
    series = await stage.get("/api/series", hours=1, destination="mail")
    assert 0 < len(series["points"]) <= 180
    assert series["step_seconds"] > 0
    assert await stage.get("/api/dead-letters") == {"dead_letters": [], "cursor": None}


async def test_the_same_questions_are_answered_without_api_in_the_path(stage: Stage) -> None:
    assert await stage.get("/stats") == await stage.get("/api/stats")
    assert (await stage.get("/events", status="failed", limit=50))["events"] == []
    assert (await stage.post("/retry"))["retried"] == 0


async def test_a_cursor_says_nothing_of_the_rows(quick: Stage) -> None:
    for number in range(2):
        id_ = quick.operated.emit("mail", aggregate_id=number)
    page = await quick.get("/api/events", limit=1)
    assert str(id_) not in page["cursor"]
    assert len(base64.urlsafe_b64decode(page["cursor"] + "==")) > 12


async def test_a_head_is_a_get_without_its_body(quick: Stage) -> None:
    async with quick.client() as client:
        answer = await client.head("/api/stats")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 100
        options = await client.options("/api/events")
        assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        assert "access-control-allow-origin" not in options.headers


async def test_metrics_are_served(stage: Stage) -> None:
    stage.operated.emit("mail")
    async with stage.client() as client:

        async def scraped() -> Any:
            # A scrape does not wait for the database; the first ones may come before its answer.
            answer = await client.get("/metrics")
            assert answer.status_code == 200
            return answer if "outbox_pending_messages" in answer.text else None

        answer = await await_for(scraped)
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_stored_number_that_no_float_holds_is_valid_json(stage: Stage) -> None:
    id_ = stage.operated.emit("mail")
    texts = {"payload": '{"n": [1e400, -1e400, 1.5]}', "headers": '{"n": 1e400}'}
    with stage.operated.engine.begin() as connection:
        connection.execute(sa.text("UPDATE outbox_event SET payload = :payload, headers = :headers"), texts)
    for accept in ("application/json", "text/html"):
        async with stage.client(headers={"accept": accept}) as client:
            answer = await client.get(f"/events/{id_}")
        assert answer.status_code == 200
        assert "Infinity" not in answer.text
        if accept == "text/html":
            continue

        def refused(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        [delivery] = json.loads(answer.text, parse_constant=refused)["deliveries"]
        first, second, third = delivery["payload"]["n"]
        # PostgreSQL stores all the digits.
        assert (first, second) in (("1e400", "-1e400"), (10**400, -(10**400)))
        assert third == 1.5
