"""What operators do, on every database."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.core.outcome import Delivered, Retried
from relaybox.errors import ConfigError, StoreError
from relaybox.stores.ledger import Audit, Filter
from relaybox.stores.store import Settlement
from tests.integration.operated import Operated, details


async def test_retry_starts_failed_deliveries_again(outbox: Operated) -> None:
    ids = [outbox.emit("mail", max_attempts=1, aggregate_id=number) for number in range(3)]
    await outbox.fail("mail")
    outbox.change(ids[0], crashes=2)
    pending = outbox.emit("mail")
    assert (await outbox.admin.retry(Filter(destination="mail"), dry_run=True)).affected == 3
    assert outbox.row(ids[0]).status == "failed"
    assert outbox.audit() == []
    done = await outbox.admin.retry(Filter(destination="mail"))
    assert (done.affected, done.skipped) == (3, 0)
    row = outbox.row(ids[0])
    assert (row.status, row.attempts, row.crashes, row.error_message) == ("pending", 0, 0, None)
    assert {d.id for d in (await outbox.claim("mail")).deliveries} == {*ids, pending}
    [(actor, action, entry, affected)] = outbox.audit()
    assert (actor, action, affected) == ("tester", "retry", 3)
    assert details(entry) == {"filter": {"status": "failed", "destination": "mail"}}


@pytest.mark.parametrize("action", ["retry", "discard", "replay"])
async def test_what_is_no_longer_as_it_was_seen_is_left(outbox: Operated, action: str) -> None:
    same, anew, saved, moved = [outbox.emit("mail", aggregate_id=number) for number in range(4)]
    await outbox.fail("mail")
    seen = (await outbox.ledger.entries.search(Filter(status="failed", destination="mail"), 10)).entries
    await outbox.admin.retry([anew])
    await outbox.fail("mail", "another error")
    await outbox.admin.retry([saved])
    outbox.change(moved, destination="web")
    audit = Audit("tester", action, {})
    if action == "replay":
        changed: Iterable[UUID] = await outbox.ledger.changes.replay(seen, None, {}, audit)
    else:
        changed = await getattr(outbox.ledger.changes, action)(seen, {}, audit)
    assert {*changed} == {same}
    copies = 1 if action == "replay" else 0
    assert len(outbox.rows()) == 4 + copies
    assert [outbox.row(id_).status for id_ in (anew, saved, moved)] == ["failed", "pending", "failed"]


async def test_retry_by_id_also_makes_due_what_backs_off_but_not_what_is_for_later(outbox: Operated) -> None:
    waiting = outbox.emit("mail")
    await outbox.back_off("mail")
    later = outbox.emit("mail", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    assert (await outbox.admin.retry(Filter(destination="mail"))).affected == 0
    unknown = uuid4()
    done = await outbox.admin.retry([waiting, later, unknown])
    assert (done.affected, done.skipped, done.unknown) == (1, 1, (unknown,))
    [delivery] = (await outbox.claim("mail")).deliveries
    assert (delivery.id, delivery.attempts) == (waiting, 2)
    assert await outbox.kinds(later) == ["scheduled"]


async def test_retry_of_a_blocked_key_starts_at_its_head(outbox: Operated) -> None:
    first, second, third = (outbox.emit("shop", key="k") for _ in range(3))
    await outbox.fail("shop", limit=1)
    # As if it had failed while the destination was not ordered.
    outbox.change(second, status="failed", next_attempt_at=None)
    assert not (await outbox.claim("shop")).deliveries
    await outbox.admin.retry([second])
    assert not (await outbox.claim("shop")).deliveries
    assert await outbox.kinds(second) == ["parked"]
    await outbox.admin.retry([first])
    assert [d.id for d in (await outbox.claim("shop")).deliveries] == [first, second, third]


async def test_a_leased_delivery_is_neither_retried_nor_discarded_nor_moved(outbox: Operated) -> None:
    held = outbox.emit("mail")
    await outbox.claim("mail")
    assert (await outbox.admin.retry([held])).skipped == 1
    assert (await outbox.admin.discard([held])).skipped == 1
    moved = await outbox.admin.move("mail", "shop")
    assert (moved.affected, moved.skipped) == (0, 1)
    assert (await outbox.admin.replay([held])).skipped == 1
    assert outbox.row(held).lease_owner == "relay-1"
    assert outbox.audit() == []


async def test_what_was_claimed_after_it_was_found_is_left_alone(outbox: Operated) -> None:
    ids = [outbox.emit("mail"), outbox.emit("mail")]
    found = [entry for id_ in ids for entry in await outbox.ledger.entries.find(id_)]
    [delivery] = (await outbox.claim("mail", limit=1)).deliveries
    changed = await outbox.ledger.changes.discard(found, {}, Audit("tester", "discard", {}))
    assert changed == {ids[1]}
    assert outbox.audit()[0][3] == 1
    assert not await outbox.store.settle([Settlement(delivery, Delivered())])


async def test_discard_gives_up_the_head_and_frees_its_key(outbox: Operated) -> None:
    first, second = outbox.emit("shop", key="k"), outbox.emit("shop", key="k")
    await outbox.fail("shop", limit=1)
    assert not (await outbox.claim("shop")).deliveries
    assert outbox.row(second).next_attempt_at is None
    assert (await outbox.admin.discard([first])).affected == 1
    row = outbox.row(first)
    assert (row.status, row.next_attempt_at, row.error_message) == ("discarded", None, "422 Unprocessable")
    assert outbox.row(second).next_attempt_at is not None
    assert [d.id for d in (await outbox.claim("shop")).deliveries] == [second]


async def test_discard_by_filter_takes_failed_deliveries_by_default(outbox: Operated) -> None:
    outbox.emit("mail")
    await outbox.fail("mail")
    pending = outbox.emit("mail")
    assert (await outbox.admin.discard(Filter(destination="mail"))).affected == 1
    assert outbox.row(pending).status == "pending"
    assert (await outbox.admin.discard(Filter(destination="mail", status="due"))).affected == 1
    assert outbox.row(pending).status == "discarded"
    with pytest.raises(ConfigError, match="status = 'delivered': discard takes failed, pending"):
        await outbox.admin.discard(Filter(status="delivered"))


async def test_a_zombie_cannot_settle_what_was_discarded_after_its_lease(outbox: Operated) -> None:
    event = outbox.emit("mail")
    [delivery] = (await outbox.claim("mail", lease=60)).deliveries
    outbox.change(event, leased_until=datetime.now(UTC) - timedelta(seconds=1))
    assert (await outbox.admin.discard([event])).affected == 1
    assert await outbox.store.settle([Settlement(delivery, Delivered())]) == {event}
    assert outbox.row(event).status == "discarded"


async def test_replay_writes_the_event_again(outbox: Operated) -> None:
    event = outbox.emit("shop", key="k", headers={"trace": "1"})
    await outbox.deliver("shop")
    done = await outbox.admin.replay([event])
    assert done.affected == 1
    old, new = outbox.rows(event_id=event)
    assert old.status == "delivered"
    assert (new.status, new.attempts, new.ordering_key) == ("pending", 0, "k")
    assert new.position > old.position
    assert details(new.headers) == {"trace": "1", "relaybox-replay": str(event)}
    assert (details(new.payload), new.idempotency_key) == ({"total": 42}, old.idempotency_key)
    assert [d.id for d in (await outbox.claim("shop")).deliveries] == [new.id]
    assert len(await outbox.admin.event(event)) == 2
    [(_, action, entry, affected)] = outbox.audit()
    assert (action, details(entry), affected) == ("replay", {"ids": [str(event)]}, 1)


async def test_replay_to_another_destination_keeps_a_key_only_where_that_is_ordered(outbox: Operated) -> None:
    event = outbox.emit("shop", key="k")
    await outbox.fail("shop")
    await outbox.admin.replay(Filter(status="failed"), to="mail")
    await outbox.admin.replay(Filter(status="failed"), to="spare")
    copies = {row.destination: row.ordering_key for row in outbox.rows(event_id=event)}
    assert copies == {"shop": "k", "mail": None, "spare": "k"}
    with pytest.raises(ConfigError, match="no destination is called 'spear'; did you mean 'spare'"):
        await outbox.admin.replay([event], to="spear")


async def test_replay_keeps_the_old_order_and_ends(outbox: Operated) -> None:
    ids = [outbox.emit("shop", key="k") for _ in range(5)]
    await outbox.deliver("shop")
    assert (await outbox.admin.replay(Filter(destination="shop"), dry_run=True)).affected == 5
    assert (await outbox.admin.replay(Filter(destination="shop"))).affected == 5
    assert [d.event_id for d in (await outbox.claim("shop")).deliveries] == ids


async def test_replay_leaves_out_what_has_no_destination_now(outbox: Operated) -> None:
    event = outbox.emit("gone")
    await outbox.deliver("gone")
    done = await outbox.admin.replay([event])
    assert (done.affected, done.skipped) == (0, 1)
    assert (await outbox.admin.replay([event], to="mail")).affected == 1


async def test_move_gives_pending_and_failed_deliveries_to_another_destination(outbox: Operated) -> None:
    first, second, third = (outbox.emit("shop", key="k") for _ in range(3))
    await outbox.fail("shop", limit=1)
    assert not (await outbox.claim("shop")).deliveries
    assert (await outbox.admin.move("shop", "spare", dry_run=True)).affected == 3
    assert (await outbox.admin.move("shop", "spare")).affected == 3
    assert {row.destination for row in outbox.rows()} == {"spare"}
    assert outbox.row(first).status == "failed"
    assert not (await outbox.claim("spare")).deliveries
    await outbox.admin.retry([first])
    assert [d.id for d in (await outbox.claim("spare")).deliveries] == [first, second, third]


async def test_move_to_an_unordered_destination_frees_what_was_parked(outbox: Operated) -> None:
    first, second = outbox.emit("shop", key="k"), outbox.emit("shop", key="k")
    await outbox.settle("shop", Retried(3600.0, "busy"), limit=1)
    assert not (await outbox.claim("shop")).deliveries
    later = outbox.emit("gone", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    assert (await outbox.admin.move("shop", "mail")).affected == 2
    assert (await outbox.admin.move("gone", "mail")).affected == 1
    deliveries = (await outbox.claim("mail")).deliveries
    assert [(d.id, d.ordering_key, d.attempts) for d in deliveries] == [(first, None, 1), (second, None, 1)]
    assert await outbox.kinds(later) == ["scheduled"]


async def test_what_no_route_took_can_be_seen_and_moved(outbox: Operated) -> None:
    event = outbox.emit()
    assert await outbox.kinds(event) == ["unrouted"]
    assert [one.name for one in (await outbox.admin.stats()).destinations if not one.configured] == [""]
    assert (await outbox.admin.move("", "mail")).affected == 1
    assert await outbox.kinds(event) == ["due"]


async def test_move_wants_a_destination_that_exists_and_is_another(outbox: Operated) -> None:
    outbox.emit("gone")
    with pytest.raises(ConfigError, match="no destination is called 'goon'; did you mean 'gone'"):
        await outbox.admin.move("goon", "mail")
    with pytest.raises(ConfigError, match="no destination is called 'gone'"):
        await outbox.admin.move("mail", "gone")
    with pytest.raises(ConfigError, match="to = 'mail': the rows are there already"):
        await outbox.admin.move("mail", "mail")


async def test_pause_stops_claims_and_resume_lets_them_go_on(outbox: Operated) -> None:
    event = outbox.emit("mail")
    await outbox.admin.pause("mail", "maintenance")
    held = (await outbox.claim("mail")).held
    assert held is not None
    assert (held.why, held.reason) == ("paused", "maintenance")
    assert await outbox.admin.resume("mail")
    assert [d.id for d in (await outbox.claim("mail")).deliveries] == [event]
    assert not await outbox.admin.resume("mail")
    assert outbox.done() == [("tester", "pause", 1), ("tester", "resume", 1)]


async def test_a_pause_ends_at_its_time_and_resume_closes_the_circuit(outbox: Operated) -> None:
    outbox.emit("mail")
    await outbox.admin.pause("mail", "short", datetime.now(UTC) - timedelta(seconds=1))
    assert (await outbox.claim("mail")).deliveries
    outbox.emit("web")
    await outbox.store.open_circuit("web", 3600.0, "refused")
    assert (await outbox.claim("web")).held is not None
    assert await outbox.admin.resume("web")
    assert (await outbox.claim("web")).deliveries


async def test_an_action_without_its_audit_does_not_happen(outbox: Operated) -> None:
    event = outbox.emit("shop", key="k")
    await outbox.fail("shop")
    outbox.tables.audit.drop(outbox.engine)
    admin = outbox.admin
    for action in (admin.retry, admin.discard, admin.replay):
        with pytest.raises(StoreError):
            await action([event])
    for between in (admin.move("shop", "mail"), admin.pause("shop", "no reason")):
        with pytest.raises(StoreError):
            await between
    [row] = outbox.rows()
    assert (row.status, row.destination) == ("failed", "shop")
    place = (await outbox.ledger.overview.states())["shop"]
    assert not place.paused


async def test_bulk_work_goes_in_batches_and_reports(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.operate.action.BATCH", 2)
    for _ in range(5):
        outbox.emit("mail")
    await outbox.fail("mail")
    seen: list[int] = []
    done = await outbox.admin.retry(Filter(status="failed"), progress=seen.append)
    assert (done.affected, seen) == (5, [2, 4, 5])
    assert [affected for *_, affected in outbox.audit()] == [2, 2, 1]
    assert {row.status for row in outbox.rows()} == {"pending"}


async def test_a_row_that_fails_again_is_not_retried_twice(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.operate.action.BATCH", 2)
    for number in range(4):
        outbox.emit("mail", aggregate_id=number)
    await outbox.fail("mail")
    retry = outbox.ledger.changes.retry

    async def retry_and_fail(*arguments: Any) -> frozenset[UUID]:
        changed = await retry(*arguments)
        await outbox.fail("mail")
        return changed

    monkeypatch.setattr(outbox.ledger.changes, "retry", retry_and_fail)
    assert (await outbox.admin.retry(Filter(status="failed"))).affected == 4


async def test_move_takes_the_rows_of_a_key_in_their_order_though_their_ids_are_in_another(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [outbox.emit("shop", key=key) for key in "aaaabaaa"]
    last = 2 * len(ids)
    backwards = [UUID(int=(last - number) << 80 | 7 << 76 | 2 << 62) for number in range(len(ids))]
    for old, new in zip(ids, backwards, strict=True):
        outbox.change(old, id=new)
    move, moved = outbox.ledger.changes.move, []

    async def watched(*arguments: Any) -> frozenset[UUID]:
        changed = await move(*arguments)
        moved.extend(changed)
        return changed

    monkeypatch.setattr(outbox.ledger.changes, "move", watched)
    monkeypatch.setattr("relaybox.operate.action.BATCH", 1)
    done = await outbox.admin.move("shop", "spare")
    assert (done.affected, done.skipped) == (8, 0)
    assert {row.destination for row in outbox.rows()} == {"spare"}
    keys = {row.id: (row.ordering_key, row.position) for row in outbox.rows()}
    of_a = [keys[id_][1] for id_ in moved if keys[id_][0] == "a"]
    assert of_a == sorted(of_a)
    assert len(of_a) == 7
