"""The command's JSON and the API's are the same document, for every kind of object that both show."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from relaybox import Outbox
from relaybox.core.outcome import Failed
from relaybox.operate.admin import Admin, DestinationStats, Stats
from relaybox.stores.ledger import Counts
from relaybox.stores.store import DeadLetter, Settlement
from relaybox.web import dashboard
from tests.integration.operated import CONFIGURATION, Operated, relaybox
from tests.web.stage import USERS, Stage

LAST = "[destinations.last]\nsink = 'http://127.0.0.1:1/a/path?k=1'\ndead_letter = 'web'\nmax_attempts = 3\n"
CONSTANT = {"oldest_pending_seconds": 1.0}
"""The values that change while two questions are asked."""


@pytest.fixture
async def shown(
    migrated_database: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    """The API and, in this directory, the command: with the same settings, on the same SQLite file."""
    url = migrated_database("sqlite")
    (tmp_path / "relaybox.toml").write_text(CONFIGURATION + LAST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELAYBOX_DATABASE", url)
    async with Stage(url) as stage:
        stage.outbox = Outbox()
        stage.web = dashboard(stage.outbox, users=USERS)
        yield stage


async def command(words: str) -> Any:
    """Run a command beside the event loop of the API."""
    return json.loads(await asyncio.to_thread(relaybox, *words.split(), "--json"))


async def everything(operated: Operated) -> dict[str, UUID]:
    """Emit a delivery in every state; hold destinations up; leave relays, dead letters and an audit."""
    ids = {"failed": operated.emit("shop", payload={"total": 1, "at": "Café"}, headers={"tenant": "a"})}
    ids["blocked"] = operated.emit("shop")
    await operated.fail("shop", "422 order 17 is unknown", limit=1)
    ids["delivered"] = operated.emit("mail")
    await operated.deliver("mail")
    ids["backing_off"] = operated.emit("mail")
    await operated.back_off("mail", "503 busy")
    ids["dead"] = operated.emit("spare")
    [delivery] = (await operated.claim("spare")).deliveries
    await operated.store.settle(
        [Settlement(delivery, Failed("413 too large"))], dead_letter=DeadLetter("web", 5, ordered=False)
    )
    ids["unknown"] = operated.emit("gone")
    ids["several"] = operated.emit("mail", "web")
    await operated.store.open_circuit("web", 600.0, "503 away")
    await operated.admin.pause("spare", "a migration")
    operated.beat()
    operated.beat("relay-2", ago=600)
    return ids


def steady(value: Any) -> Any:
    """Return a document in which nothing depends on the time of the question."""
    if isinstance(value, Mapping):
        return {name: CONSTANT.get(name, steady(one)) for name, one in value.items()}
    return [steady(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("words", "path"),
    [
        pytest.param("status", "stats", id="counts, destinations and relays"),
        pytest.param("events list", "events", id="events"),
        *(
            pytest.param(f"{question} {{{state}}}", f"events/{{{state}}}{path}", id=f"{question}: {state}")
            for question, path in (("events show", ""), ("why", "/why"))
            for state in ("failed", "blocked", "delivered", "backing_off", "dead", "unknown", "several")
        ),
        pytest.param("failures", "failures", id="failures"),
        pytest.param("dead-letters", "dead-letters", id="dead letters"),
        pytest.param("audit", "audit", id="audit"),
    ],
)
async def test_the_command_and_the_api_answer_the_same(shown: Stage, words: str, path: str) -> None:
    ids = await everything(shown.operated)
    of_api = await shown.get(f"/api/{path.format(**ids)}")
    of_command = await command(words.format(**ids))
    assert steady(of_command) == steady(of_api)
    assert any(value for value in of_api.values())


@pytest.mark.parametrize("action", ["retry", "replay", "discard", "move"])
async def test_the_command_and_the_api_do_the_same(shown: Stage, action: str) -> None:
    ids = await everything(shown.operated)
    words, body = f"{action} {ids['failed']}", {"ids": [str(ids["failed"])], "dry_run": True}
    if action == "move":
        words, body = "move gone mail", {"from": "gone", "to": "mail", "dry_run": True}
    of_api = await shown.post(f"/api/{action}", body)
    assert await command(f"{words} --dry-run") == of_api
    [changed] = [of_api[name] for name in ("retried", "replayed", "discarded", "moved") if name in of_api]
    assert changed == 1


@pytest.mark.parametrize("action", ["pause", "resume", "test"])
async def test_the_command_and_the_api_treat_a_destination_alike(shown: Stage, action: str) -> None:
    of_command = await command(f"{'send-test' if action == 'test' else action} mail")
    of_api = await shown.post(f"/api/destinations/mail/{action}")
    if action == "test":
        assert of_command.pop("event_id") != of_api.pop("event_id")
    assert of_command == of_api


async def test_counts_that_are_capped_are_the_same(shown: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    capped = Counts(due=10_000, sending=10_000, delivered=7, capped=frozenset({"due", "sending"}))

    async def ask(_: object) -> Stats:
        return Stats(capped, (DestinationStats("mail", True, capped, None),), ())

    monkeypatch.setattr(Admin, "stats", ask)
    of_api = await shown.get("/api/stats")
    assert (of_api["processing"], of_api["capped"]) == (10_000, ["due", "pending", "processing"])
    assert await command("status") == of_api


async def test_only_the_command_shows_a_binary_payload(shown: Stage) -> None:
    id_ = shown.operated.emit("mail", payload=b"\x00\xffraw")
    [of_api] = (await shown.get(f"/api/events/{id_}"))["deliveries"]
    [of_command] = (await command(f"events show {id_}"))["deliveries"]
    assert base64.b64decode(of_command.pop("payload_data")) == b"\x00\xffraw"
    assert of_command == of_api


async def test_only_the_api_hides_secrets(shown: Stage) -> None:
    id_ = shown.operated.emit("mail", payload={"token": "t", "total": 1})
    [of_api] = (await shown.get(f"/api/events/{id_}"))["deliveries"]
    [of_command] = (await command(f"events show {id_}"))["deliveries"]
    assert (of_api["payload"]["token"], of_command["payload"]["token"]) == ("•••", "t")
