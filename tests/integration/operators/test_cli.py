"""The commands of operators, as they are typed."""

from __future__ import annotations

import json
import os
import pty
import pwd
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from relaybox.cli import app
from relaybox.cli.options import actor
from relaybox.core.outcome import Failed
from relaybox.stores.store import Settlement
from tests.databases import KINDS
from tests.integration.operated import CONFIGURATION, Operated, on, relaybox

RELAYBOX = (sys.executable, "-m", "relaybox")
SECONDS = 60.0


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a terminal."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


async def in_every_state(outbox: Operated) -> dict[str, UUID]:
    """Make one delivery for each answer that ``why`` has."""
    ids: dict[str, UUID] = {}
    ids["delivered"] = outbox.emit("mail")
    await outbox.deliver("mail")
    ids["failed"] = outbox.emit("mail")
    await outbox.fail("mail", "422 Unprocessable Entity")
    ids["discarded"] = outbox.emit("mail")
    await outbox.admin.discard([ids["discarded"]])
    ids["backing_off"] = outbox.emit("mail")
    await outbox.back_off("mail", "500 Internal\nServer Error")
    ids["scheduled"] = outbox.emit("mail", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    ids["lease_expired"] = outbox.emit("mail")
    await outbox.claim("mail")
    outbox.change(ids["lease_expired"], leased_until=datetime.now(UTC) - timedelta(seconds=5))
    ids["head"] = outbox.emit("shop", key="k")
    await outbox.back_off("shop", "busy")
    ids["parked"] = outbox.emit("shop", key="k")
    ids["blocking"] = outbox.emit("shop", key="b")
    ids["blocked"] = outbox.emit("shop", key="b")
    claim = await outbox.claim("shop")
    await outbox.store.settle([Settlement(claim.deliveries[0], Failed("broken"))])
    await outbox.store.release(claim.deliveries[1:])
    ids["sending"] = outbox.emit("shop", key="s")
    await outbox.claim("shop", lease=3600)
    ids["paused"] = outbox.emit("spare")
    await outbox.admin.pause("spare", "maintenance")
    ids["circuit_open"] = outbox.emit("web")
    await outbox.store.open_circuit("web", 3600.0, "connection refused")
    ids["unknown_destination"] = outbox.emit("gone")
    ids["due"] = outbox.emit("mail")
    return ids


SENTENCES = {
    "delivered": r"\(order.paid for mail\) was delivered at TIME, 1 attempt in all",
    "failed": "failed at TIME after 1 attempt: 422 Unprocessable Entity; "
    "`relaybox retry ID` or `relaybox discard ID`",
    "discarded": "was discarded by an operator at TIME",
    "backing_off": "backs off after attempt 1 of 5, which failed: 500 Internal Server Error; "
    "the next one is at TIME",
    "scheduled": "was emitted for later and is due at TIME",
    "lease_expired": "was held by relay-1 until its lease ran out at TIME with no answer: "
    "it is claimed again when a relay runs, but none runs now; `relaybox relay`",
    "parked": "waits behind event ID of its key 'k', which backs off after attempt 1 of 5, "
    "which failed: busy; the next one is at TIME",
    "blocked": "waits behind event ID of its key 'b', which failed at TIME after 1 attempt: broken; "
    "`relaybox retry ID` or `relaybox discard ID`",
    "sending": "is being sent by relay-1, attempt 1 of 5; its lease runs until TIME",
    "paused": r"waits because destination 'spare' was paused by tester at TIME \(maintenance\) until "
    "somebody resumes it; `relaybox resume spare`",
    "circuit_open": r"waits because the circuit of destination 'web' is open \(connection refused\): "
    "the next probe comes at TIME; `relaybox resume web` closes it now",
    "unknown_destination": "waits because no destination is called 'gone'; configure it, "
    "or give its events to another: `relaybox move gone NAME`",
    "due": "is due since TIME and is claimed when a relay runs, but none runs now; `relaybox relay`",
}


@pytest.mark.parametrize("url", KINDS, indirect=True)
def test_why_tells_the_truth(url: str) -> None:
    ids = on(url, in_every_state)
    for name, text in SENTENCES.items():
        [answer] = json.loads(relaybox("why", ids[name], "--json"))["deliveries"]
        kind = "parked" if name == "blocked" else name
        assert (answer["why"], answer["id"]) == (kind, str(ids[name])), name
        pattern = text.replace("TIME", r"[-0-9]{10} [:0-9]{8} UTC").replace("ID", "[-0-9a-f]{36}")
        line = relaybox("why", ids[name])
        assert re.fullmatch(rf"{ids[name]} .*{pattern}\.\n", line), (name, line)
    [parked] = json.loads(relaybox("why", ids["parked"], "--json"))["deliveries"]
    assert parked["behind"]["why"] == "backing_off"
    assert parked["behind"]["id"] == str(ids["head"])
    [blocked] = json.loads(relaybox("why", ids["blocked"], "--json"))["deliveries"]
    assert (blocked["behind"]["why"], blocked["behind"]["id"]) == ("failed", str(ids["blocking"]))
    [scheduled] = json.loads(relaybox("why", ids["scheduled"], "--json"))["deliveries"]
    assert timedelta(minutes=59) < datetime.fromisoformat(scheduled["until"]) - datetime.now(UTC)


def test_why_says_whether_a_relay_is_there(url: str) -> None:
    async def emit(outbox: Operated) -> UUID:
        outbox.beat("old", ago=3600)
        return outbox.emit("mail")

    event = on(url, emit)
    assert re.search(r"when a relay runs, but the last was seen at [-0-9]{10} ", relaybox("why", event))

    async def beat(outbox: Operated) -> None:
        outbox.beat("new", ago=-600)

    on(url, beat)
    assert relaybox("why", event).endswith("is claimed by the next relay that has room.\n")


def test_why_tells_of_every_delivery_of_an_event(url: str) -> None:
    async def emit(outbox: Operated) -> UUID:
        event = outbox.emit("mail", "web", "gone")
        await outbox.store.open_circuit("web", 0.0, "refused")
        assert await outbox.store.probe("web", 60.0)
        return event

    event = on(url, emit)
    answer = json.loads(relaybox("why", event, "--json"))["deliveries"]
    assert [(one["destination"], one["why"]) for one in answer] == [
        ("mail", "due"),
        ("web", "circuit_half_open"),
        ("gone", "unknown_destination"),
    ]
    assert "is half-open (refused): a probe is on its way" in relaybox("why", event)


@pytest.mark.parametrize("command", [("why",), ("events", "show"), ("retry",), ("discard",), ("replay",)])
def test_an_unknown_id_is_one_line_and_the_status_1(command: tuple[str, ...], url: str) -> None:
    on(url, in_every_state)
    unknown = uuid4()
    said = relaybox(*command, unknown, status=1)
    assert said.startswith(f"relaybox: no event and no delivery has the id {unknown}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("why", "42"), "'42' is not an id: write the UUID"),
        (("retry",), "say which: ids, or a filter such as --destination NAME, or --all"),
        (("retry", "--all", "--destination", "mail"), "say which: "),
        (("retry", "--all"), "nobody is here to confirm this: add --yes, or --dry-run"),
        (("move", "gone", "mail"), "nobody is here to confirm this: add --yes"),
        (("retry", "--status", "delivered", "--yes"), "status = 'delivered': retry takes failed"),
        (("discard", "--destination", "mial", "-y"), "no destination is called 'mial'; did you mean 'mail'?"),
        (("pause", "gonne"), "no destination is called 'gonne'; did you mean 'gone'?"),
        (("replay", "--all", "--to", "gone", "--yes"), "no destination is called 'gone'"),
        (("events", "list", "--since", "tomorrow"), "--since = 'tomorrow': write a duration such as '30m'"),
        (("pause", "mail", "--until", "soon"), "--until = 'soon': write a duration"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_the_status_2(arguments: tuple[str, ...], message: str, url: str) -> None:
    on(url, in_every_state)
    said = relaybox(*arguments, status=2)
    assert said.startswith(f"relaybox: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "names"), [("sqlite", "prefix = 'x_'"), ("postgresql-18", "schema = 'Ours'")]
)
def test_tables_of_other_names_are_served(
    kind: str,
    names: str,
    here: None,
    fresh_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RELAYBOX_DATABASE", fresh_database(kind))
    (tmp_path / "relaybox.toml").write_text(f"[relaybox]\n{names}\n{CONFIGURATION}")
    relaybox("migrate")
    assert relaybox("pause", "mail") == "paused mail\n"
    [mail] = [one for one in json.loads(relaybox("status", "--json"))["destinations"] if one["paused"]]
    assert mail["name"] == "mail"
    assert relaybox("resume", "mail") == "resumed mail\n"
    assert relaybox("retry", "--all", "--yes") == "retried 0\n"
    assert relaybox("events", "list", "--status", "failed") == "no delivery matches\n"
    assert relaybox("why", uuid4(), status=1).startswith("relaybox: no event")


COMMANDS = [("status",), ("why", UUID(int=1)), ("events", "list"), ("retry", "--all", "--yes")]


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_tables_are_one_line_with_the_database_and_the_fix(
    command: tuple[object, ...], here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "sqlite:///empty.db"
    monkeypatch.setenv("RELAYBOX_DATABASE", url)
    missing = "the tables are missing: run `relaybox migrate`\n"
    assert relaybox(*command, status=2) == f"relaybox: {url}: {missing}"
    monkeypatch.delenv("RELAYBOX_DATABASE")
    default = "sqlite:///relaybox.db (the default; choose with --app or --database)"
    assert relaybox(*command, status=2) == f"relaybox: {default}: {missing}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_is_away_is_one_line_with_the_fix(command: tuple[object, ...], here: None) -> None:
    said = relaybox(*command, "--database", "postgresql://me:hush@127.0.0.1:1/db", status=2)
    assert said.startswith("relaybox: postgresql://***@127.0.0.1:1/db: ")
    assert said.endswith(
        "; start it, or choose another with --database, RELAYBOX_DATABASE or relaybox.toml\n"
    )
    assert "hush" not in said


def test_a_command_acts_as_its_account_whatever_the_environment_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER"):
        monkeypatch.delenv(variable, raising=False)
    assert actor() == f"{account}@{host}"
    monkeypatch.setenv("USER", "eve")
    monkeypatch.setenv("LOGNAME", account)
    assert actor() == f"{account}@{host}"
    monkeypatch.setenv("LOGNAME", "eve\n\x1b[31m")
    assert actor() == f"{account}@{host} (eve??[31m)"
    monkeypatch.setenv("SUDO_USER", "ann")
    assert actor() == f"{account}@{host} (ann)"


def test_status_counts_and_names_what_holds_a_destination_up(url: str) -> None:
    on(url, in_every_state)
    stats = json.loads(relaybox("status", "--json"))
    counts = {"pending": 10, "processing": 1, "completed": 1, "failed": 2}
    assert {name: stats[name] for name in counts} == counts
    assert stats["oldest_pending"].endswith("Z")
    assert 0 <= stats["oldest_pending_seconds"] < 60
    by_name = {one["name"]: one for one in stats["destinations"]}
    assert by_name["spare"]["paused"]["reason"] == "maintenance"
    assert by_name["web"]["circuit"]["state"] == "open"
    assert not by_name["gone"]["configured"]
    text = relaybox("status")
    assert re.search(r"^mail +2 +2 +0 +0 +1 +1 +\d+s +failing *$", text, re.MULTILINE), text
    assert "spare: paused by tester until somebody resumes it (maintenance)\n" in text
    assert "gone: no such destination; configure it, or `relaybox move gone NAME`\n" in text
    assert "mail: 2 wait for a later attempt (the next one: 500 Internal Server Error)\n" in text
    assert by_name["mail"]["retrying"] == "500 Internal\nServer Error"
    assert by_name["spare"]["retrying"] is None
    assert text.count("what failed, and why: `relaybox failures`\n") == 1
    assert text.endswith("no relay runs now: start one with `relaybox relay`\n")
    relaybox("discard", "--all", "--yes")
    assert "what failed" not in relaybox("status")


def test_status_names_what_one_event_that_is_tried_again_met(url: str) -> None:
    async def one_refused(outbox: Operated) -> None:
        outbox.emit("mail")
        await outbox.back_off("mail", "401 Unauthorized")

    on(url, one_refused)
    text = relaybox("status")
    assert re.search(r"^mail +0 +1 +0 +0 +0 +0 +\d+s +retrying *$", text, re.MULTILINE), text
    assert "mail: 1 waits for a later attempt (the next one: 401 Unauthorized)\n" in text


@pytest.mark.parametrize("url", KINDS, indirect=True)
def test_a_function_that_is_over_its_time_is_named(url: str) -> None:
    async def claimed_long_ago(outbox: Operated) -> UUID:
        id_ = outbox.emit("mail")
        await outbox.claim("mail", lease=3600)
        outbox.change(id_, last_attempt_at=datetime.now(UTC) - timedelta(minutes=5))
        return id_

    id_ = on(url, claimed_long_ago)
    running = "its function is over its time of 30 s"
    assert running not in relaybox("why", id_) + relaybox("status")
    Path("relaybox.toml").write_text(
        CONFIGURATION.replace(
            "[destinations.mail]\nsink = 'console:'", "[destinations.mail]\nsink = 'handler:a:b'"
        )
    )
    assert re.search(
        rf"its lease runs until .*; it was claimed at .* UTC, and {running}", relaybox("why", id_)
    )
    assert re.search(rf"^mail: sending for 5m.*: {running}", relaybox("status"), re.MULTILINE)


def test_events_list_pages_and_filters(url: str) -> None:
    ids = on(url, in_every_state)
    first = json.loads(relaybox("events", "list", "--limit", 2, "--json"))
    assert [event["id"] for event in first["events"]] == [str(ids["due"]), str(ids["unknown_destination"])]
    rest = json.loads(relaybox("events", "list", "--cursor", first["cursor"], "--json"))
    assert len(rest["events"]) == len(ids) - 2
    assert rest["cursor"] is None
    failed = relaybox("events", "list", "--status", "failed", "--destination", "mail", "--error", "unprocess")
    assert failed.splitlines()[1].split()[:2] == [str(ids["failed"]), "failed"]
    assert relaybox("events", "list", "--type", "no.such") == "no delivery matches\n"
    assert f"more: --cursor {ids['due']}\n" in relaybox("events", "list", "--limit", 1)


def test_events_show_has_payload_headers_and_attempts(url: str) -> None:
    ids = on(url, in_every_state)
    [shown] = json.loads(relaybox("events", "show", ids["backing_off"], "--json"))["deliveries"]
    assert (shown["payload"], shown["headers"], shown["state"]) == ({"total": 42}, {}, "scheduled")
    assert [one["error_message"] for one in shown["failed_attempts"]] == ["500 Internal\nServer Error"]
    text = relaybox("events", "show", ids["backing_off"])
    assert re.search(r"^attempt 1 +[-0-9]{10} [:0-9]{8} UTC, relay-1: 500 Internal�Server Error$", text, re.M)
    assert '\npayload      {"total":42}\n' in text


def test_text_of_others_cannot_steer_the_terminal(url: str) -> None:
    async def emit(outbox: Operated) -> UUID:
        event = outbox.emit("mail", event_type="a\x1b[31m[bold]b", aggregate_id="\x9b2J")
        await outbox.fail("mail", "\x1b]0;owned\x07")
        return event

    event = on(url, emit)
    for command in (("why", event), ("events", "show", event), ("events", "list")):
        said = relaybox(*command)
        assert "a�[31m[bold]b" in said
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said)


def test_actions_say_what_they_did(url: str) -> None:
    ids = on(url, in_every_state)
    assert relaybox("retry", "--all", "--dry-run") == "would have retried 2\n"
    done = {"retried": 1, "skipped": 0, "unknown": [], "dry_run": False, "capped": False}
    assert json.loads(relaybox("retry", ids["failed"], "--json")) == done
    assert relaybox("retry", ids["failed"], status=1).startswith(
        "relaybox: 1 left as they are: neither failed"
    )
    assert relaybox("retry", ids["backing_off"]) == "retried 1\n"
    assert relaybox("discard", "--all", "--yes") == "discarded 1\n"
    assert relaybox("discard", "--destination", "shop", "--yes") == "discarded 0\n"
    assert json.loads(relaybox("replay", ids["delivered"], "--to", "web", "--json"))["replayed"] == 1
    assert relaybox("move", "gone", "mail", "--dry-run") == "would have moved 1\n"
    assert json.loads(relaybox("move", "gone", "mail", "--yes", "--json"))["moved"] == 1
    assert relaybox("pause", "mail", "--until", "1h").startswith("paused mail until 20")
    assert relaybox("resume", "mail") == "resumed mail\n"
    assert relaybox("resume", "mail") == "mail was not paused, and its circuit is closed\n"
    assert json.loads(relaybox("resume", "web", "--json")) == {"destination": "web", "resumed": True}

    audits = [(action, affected) for _, action, _, affected in on(url, audit)]
    assert audits[2:] == [
        ("retry", 1), ("retry", 1), ("discard", 1), ("replay", 1), ("move", 1), ("pause", 1), ("resume", 1),
        ("resume", 1),
    ]  # fmt: skip


async def audit(outbox: Operated) -> list[tuple[str, str, Any, int]]:
    return outbox.audit()


async def one_failed_of_three(outbox: Operated) -> UUID:
    """Emit an event that failed at mail, is pending at shop and was delivered at web."""
    event = outbox.emit("mail", "shop", "web")
    await outbox.fail("mail", "422")
    await outbox.deliver("web")
    return event


def states(event: UUID) -> dict[str, str]:
    shown = json.loads(relaybox("events", "show", event, "--json"))["deliveries"]
    return {one["destination"]: one["state"] for one in shown}


@pytest.mark.parametrize("verb", ["retry", "discard"])
@pytest.mark.parametrize("command", [("why",), ("events", "show")])
def test_the_advice_for_one_delivery_touches_no_other(command: tuple[str, ...], verb: str, url: str) -> None:
    event = on(url, one_failed_of_three)
    advice = re.search(rf"`relaybox ({verb} .*?)`", relaybox(*command, event))
    assert advice is not None
    assert advice[1] == f"{verb} {event} --destination mail"
    done, after = ("retried", "due") if verb == "retry" else ("discarded", "discarded")
    assert relaybox(*advice[1].split()) == f"{done} 1\n"
    assert states(event) == {"mail": after, "shop": "due", "web": "delivered"}


def test_the_list_says_how_to_name_one_delivery(url: str) -> None:
    on(url, one_failed_of_three)
    listed = CliRunner().invoke(app, ["events", "list"])
    assert "`relaybox retry DELIVERY --destination DESTINATION`" in listed.stderr
    assert "relaybox" not in listed.stdout
    assert CliRunner().invoke(app, ["events", "list", "--status", "delivered"]).stderr == ""


@pytest.mark.parametrize(
    ("verb", "would"),
    [("discard", "discard 2 deliveries (mail, shop)"), ("replay", "replay 2 deliveries (mail, web)")],
)
@pytest.mark.full
def test_an_id_of_several_deliveries_is_asked_about(
    verb: str, would: str, url: str, terminal: tuple[int, int]
) -> None:
    event = on(url, one_failed_of_three)
    before = states(event)
    said = relaybox(verb, event, status=2)
    assert said == (
        f"relaybox: {event} names several deliveries of its event, and this would {would}: "
        "say which with --destination NAME, or add --yes for all of them\n"
    )
    ours, theirs = terminal
    os.write(ours, b"n\n")
    command = [*RELAYBOX, verb, str(event)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.startswith(f"{would}? [y/N]: ")) == (1, True), done
    assert states(event) == before
    assert relaybox(verb, event, "--yes") == f"{verb}ed 2\n"


def test_an_event_of_which_something_could_be_done_is_success(url: str) -> None:
    event = on(url, one_failed_of_three)
    done = CliRunner().invoke(app, ["retry", str(event)])
    assert (done.exit_code, done.stdout) == (0, "retried 1\n")
    assert done.stderr == "relaybox: 2 left as they are: neither failed nor backing off\n"
    assert relaybox("retry", event, status=1).startswith("relaybox: 3 left as they are: ")
    assert relaybox("replay", event, "--destination", "mail", status=1).startswith("relaybox: 1 left as they")


def test_each_id_must_come_to_something(url: str) -> None:
    ids = on(url, in_every_state)
    said = relaybox("discard", ids["failed"], ids["delivered"], status=1)
    assert said == f"relaybox: 1 left as they are: being sent or final already ({ids['delivered']})\n"


def test_a_destination_narrows_ids(url: str) -> None:
    event = on(url, one_failed_of_three)
    said = relaybox("discard", event, "--destination", "spare", status=1)
    assert said == f"relaybox: no event and no delivery for spare has the id {event}\n"
    assert "no destination is called 'mial'" in relaybox("retry", event, "--destination", "mial", status=2)
    assert "with ids only --destination" in relaybox("retry", event, "--status", "failed", status=2)
    assert relaybox("discard", event, "--destination", "shop", "--dry-run") == "would have discarded 1\n"
    assert relaybox("replay", event, "--destination", "web", "--to", "spare") == "replayed 1\n"

    [(_, action, details, affected)] = on(url, audit)
    assert (action, affected) == ("replay", 1)
    assert details == {"ids": [str(event)], "destination": "web", "to": "spare"}


def test_moving_says_what_is_being_sent_and_is_done(url: str) -> None:
    on(url, in_every_state)
    done = CliRunner().invoke(app, ["move", "shop", "spare", "--yes"])
    assert (done.exit_code, done.stdout) == (0, "moved 4\n")
    assert done.stderr == "relaybox: 1 left as they are: being sent at this moment\n"


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 0), ("n", 1, 2)])
@pytest.mark.full
def test_bulk_work_asks_on_a_terminal(
    answer: str, status: int, left: int, url: str, terminal: tuple[int, int]
) -> None:
    on(url, in_every_state)
    ours, theirs = terminal
    os.write(ours, f"{answer}\n".encode())
    command = [*RELAYBOX, "retry", "--all"]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout.startswith("retry 2 deliveries? [y/N]: ")) == (status, True), done
    assert len(json.loads(relaybox("events", "list", "--status", "failed", "--json"))["events"]) == left


def test_a_terminal_gets_a_table_without_colours_on_request(url: str, terminal: tuple[int, int]) -> None:
    on(url, in_every_state)
    ours, theirs = terminal
    command = [*RELAYBOX, "status"]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    done = subprocess.run(command, stdin=theirs, stdout=theirs, env=environment, timeout=SECONDS)
    shown = os.read(ours, 65536).decode()
    assert done.returncode == 0
    assert re.search(r"^.*mail +2 +2 +0 +0 +1 +1 +\d+s +failing *\r$", shown, re.MULTILINE), shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines())) <= 90


def start_tail(*arguments: str) -> subprocess.Popen[str]:
    command = [*RELAYBOX, "events", "tail", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "following new events; Ctrl-C ends it\n"
    return process


def test_tail_prints_new_events_and_ends_after_its_limit(url: str) -> None:
    on(url, in_every_state)
    process = start_tail("--limit", "2", "--json", "--destination", "mail")

    async def emit(outbox: Operated) -> list[UUID]:
        return [outbox.emit("mail"), outbox.emit("shop"), outbox.emit("mail")]

    first, _, last = on(url, emit)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert [json.loads(line)["id"] for line in out.splitlines()] == [str(first), str(last)]


def test_ctrl_c_ends_a_tail_with_the_status_0(url: str) -> None:
    on(url, in_every_state)
    process = start_tail()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (0, "", "")
