"""The command's JSON and the API's are the same document, for every kind of object that both show."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.main import get_command

from relaybox import Outbox
from relaybox.cli import app
from relaybox.core.outcome import Failed
from relaybox.operate.admin import Admin, DestinationStats, Stats
from relaybox.stores.ledger import Counts
from relaybox.stores.store import DeadLetter, Settlement
from relaybox.web import dashboard
from relaybox.web.routes import API
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


STATES = ("failed", "blocked", "delivered", "backing_off", "dead", "unknown", "several")
KINDS = {
    "counts, destinations and relays": ("status", "GET /api/stats"),
    "destinations": ("status", "GET /api/destinations"),
    "a destination": ("status", "GET /api/destinations/mail"),
    "relays": ("status", "GET /api/relays"),
    "deliveries": ("events list", "GET /api/events"),
    **{f"a delivery, {one}": (f"events show {{{one}}}", f"GET /api/events/{{{one}}}") for one in STATES},
    **{f"a reason, {one}": (f"why {{{one}}}", f"GET /api/events/{{{one}}}/why") for one in STATES},
    "failures": ("failures", "GET /api/failures"),
    "dead letters": ("dead-letters", "GET /api/dead-letters"),
    "audit": ("audit", "GET /api/audit"),
    "a retry": ("retry {failed} --dry-run", "POST /api/retry"),
    "a replay": ("replay {failed} --dry-run", "POST /api/replay"),
    "a discard": ("discard {failed} --dry-run", "POST /api/discard"),
    "a move": ("move gone mail --dry-run", "POST /api/move"),
    "a pause": ("pause mail", "POST /api/destinations/mail/pause"),
    "a resume": ("resume mail", "POST /api/destinations/mail/resume"),
    "a test": ("send-test mail", "POST /api/destinations/mail/test"),
}
"""What both show: how to ask the command, and how to ask the API. The names in braces are ids."""

PARTS: Mapping[str, Callable[[Any], Any]] = {
    "destinations": lambda stats: {"destinations": stats["destinations"]},
    "a destination": lambda stats: next(one for one in stats["destinations"] if one["name"] == "mail"),
    "relays": lambda stats: {"relays": stats["relays"]},
}
"""The parts of the command's document that the API shows by themselves."""

API_ALONE = {
    "GET /api/series": "the dashboard draws it",
    "GET /api/operations": "the command runs its own bulk actions",
    "GET /api/operations/{id}": "the same",
    "POST /api/operations/{id}/cancel": "the same",
    "GET /api/openapi.json": "it describes the API",
}
COMMAND_ALONE = {
    "events tail": "a line for each delivery: see test_a_new_delivery_is_the_same",
    **dict.fromkeys(("config show", "config check", "doctor"), "the machine that the command runs on"),
    **dict.fromkeys(("migrate", "drain", "prune"), "work of the command itself"),
    **dict.fromkeys(("backfill", "reindex", "reconcile", "verify"), "comparisons and searches"),
}
"""What only one of them shows, and why."""


def test_every_kind_of_object_is_compared() -> None:
    requests = [request for _, request in KINDS.values()]
    for route in API:
        pattern = re.sub(r"\{\w+\}", "[^/]+", f"{route.method} {route.path}")
        compared = any(re.fullmatch(pattern, request) for request in requests)
        assert compared != (f"{route.method} {route.path}" in API_ALONE), route.path
    for command in sorted(with_json(get_command(app), ())):
        compared = any(f"{words} ".startswith(f"{command} ") for words, _ in KINDS.values())
        assert compared != (command in COMMAND_ALONE), command


def with_json(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the commands that have the option ``--json``."""
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)
    for name, below in getattr(command, "commands", {}).items():
        yield from with_json(below, (*path, name))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_command_and_the_api_answer_the_same(shown: Stage, kind: str) -> None:
    ids = await everything(shown.operated)
    words, request = (text.format(**ids) for text in KINDS[kind])
    method, path = request.split()
    body = {"ids": [str(ids["failed"])], "dry_run": True}
    if kind == "a move":
        body = {"from": "gone", "to": "mail", "dry_run": True}
    elif "/destinations/" in path:
        body = {}
    of_command = PARTS.get(kind, dict)(await command(words))
    of_api = await (shown.get(path) if method == "GET" else shown.post(path, body))
    if kind == "a test":
        assert of_command.pop("event_id") != of_api.pop("event_id")
    assert steady(of_command) == steady(of_api)
    assert any(value for value in of_api.values())
    for changed in ("retried", "replayed", "discarded", "moved"):
        assert of_api.get(changed, 1) == 1


async def test_a_new_delivery_is_the_same(shown: Stage) -> None:
    tail = asyncio.create_task(command("events tail --limit 1"))
    while not tail.done():
        shown.operated.emit("mail")
        await asyncio.sleep(0.1)
    listed = {one["id"]: one for one in (await shown.get("/api/events", limit=500))["events"]}
    assert listed[(await tail)["id"]] == await tail


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
