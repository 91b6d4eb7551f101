"""``relaybox verify``: what a consumer recorded against what was committed."""

from __future__ import annotations

import importlib
import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from relaybox.cli import app
from relaybox.core.outcome import Delivered, Failed
from relaybox.stores.store import Settlement
from tests.databases import EVERY_KIND
from tests.integration.operated import CONFIGURATION, Operated, on


def verify(destination: str, *records: object, status: int = 0, flags: str = "") -> Any:
    """Run the command on a file of these records; its JSON."""
    lines = [record if isinstance(record, str) else json.dumps(record, default=str) for record in records]
    Path("recorded").write_text("".join(f"{line}\n" for line in lines))
    return json.loads(relaybox(destination, "recorded", "--json", *flags.split(), status=status))


def relaybox(*arguments: object, status: int = 0, **options: Any) -> str:
    done = CliRunner().invoke(app, ["verify", *map(str, arguments)], **options)
    assert done.exit_code == status, (done.stdout, done.stderr, done.exception)
    return done.stderr if status == 2 else done.stdout


async def delivered(outbox: Operated, destination: str, count: int, **options: Any) -> list[str]:
    """Emit and deliver so many events."""
    ids = [str(outbox.emit(destination, **options)) for _ in range(count)]
    await outbox.deliver(destination)
    return ids


def remember(outbox: Operated, message_id: str, at: datetime, consumer: str = "billing") -> None:
    """Write what a consumer processed into its inbox."""
    values = {"consumer": consumer, "message_id": message_id, "processed_at": at}
    with outbox.engine.begin() as connection:
        connection.execute(sa.insert(outbox.tables.inbox).values(**values))


def id_at(moment: datetime) -> UUID:
    """Return an id that was made at that moment."""
    return UUID(int=(int(moment.timestamp() * 1000) << 80) | (7 << 76) | (0b10 << 62) | 1)


def kinds(document: Any) -> list[tuple[str, str]]:
    return [(finding["kind"], finding["event_id"]) for finding in document["findings"]]


@pytest.mark.parametrize("url", EVERY_KIND, indirect=True)
def test_what_was_recorded_is_compared_with_what_was_committed(url: str) -> None:
    first: int = 0

    async def prepare(outbox: Operated) -> list[str]:
        nonlocal first
        ids = await delivered(outbox, "shop", 5, key="k")
        first = outbox.rows()[0].position
        return ids

    a, b, c, *late = on(url, prepare)
    good = verify("shop", a, {"event_id": b}, {"id": c, "data": {"total": 42.0}}, *late)
    assert good["ok"]
    assert (good["events"], good["recorded"], good["records"], good["payloads"]) == (5, 5, 5, 1)

    stranger = str(uuid7())
    bad = verify("shop", b, a, c, a, late[1], {"webhook-id": c, "payload": {"total": 43}}, stranger, status=1)
    assert not bad["ok"]
    assert kinds(bad) == [
        ("lost", late[0]),
        ("phantom", stranger),
        ("disorder", b),
        ("altered", c),
        ("duplicate", a),
        ("duplicate", c),
    ]
    texts = [finding["text"] for finding in bad["findings"]]
    assert texts[2] == (
        f"position {first + 1} of key 'k' came at line 1, but position {first} before it came at line 2"
    )
    assert texts[3] == "came at line 6 with another payload than the stored one"
    assert texts[4] == "was recorded 2 times, first at line 2"
    assert bad["duplicate"] == 2


@pytest.mark.parametrize("url", EVERY_KIND, indirect=True)
def test_events_not_delivered_yet_or_visibly_failed_are_not_differences(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "mail", 2)
        outbox.emit("mail")
        await outbox.fail("mail")
        await outbox.admin.discard([outbox.emit("mail")])
        outbox.emit("mail")
        return ids

    ids = on(url, prepare)
    document = verify("mail", *ids)
    assert document["ok"]
    counted = {name: document[name] for name in ("events", "recorded", "pending", "failed", "discarded")}
    assert counted == {"events": 5, "recorded": 2, "pending": 1, "failed": 1, "discarded": 1}


@pytest.mark.parametrize("url", EVERY_KIND, indirect=True)
def test_an_inbox_is_a_record_too(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "shop", 3, key="k")
        start = datetime.now(UTC)
        for place, id_ in enumerate([ids[1], ids[0], "not-one-of-ours"]):
            remember(outbox, id_, start - timedelta(milliseconds=place))
        remember(outbox, ids[2], start, consumer="other")
        return ids

    ids = on(url, prepare)
    document = json.loads(relaybox("shop", "--inbox", "billing", "--json", status=1))
    assert kinds(document) == [("lost", ids[2])]
    assert (document["records"], document["disorder"]) == (2, 0)
    assert "inbox_message has no event of this consumer" in relaybox("shop", "--inbox", "bill", status=2)


def test_processed_at_tells_the_order_of_an_inbox_and_the_same_moment_none(url: str) -> None:
    moment = datetime.now(UTC)

    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "shop", 3, key="k")
        for id_, at in zip(ids, [moment, moment, moment - timedelta(seconds=1)], strict=True):
            remember(outbox, id_, at)
        return ids

    ids = on(url, prepare)
    document = json.loads(relaybox("shop", "--inbox", "billing", "--json", status=1))
    assert kinds(document) == [("disorder", ids[2])]


def test_what_was_delivered_after_the_records_were_read_is_not_lost(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "mail", 2)
        outbox.change(UUID(ids[1]), delivered_at=datetime.now(UTC) + timedelta(minutes=1))
        return ids

    document = verify("mail", on(url, prepare)[0])
    assert (document["ok"], document["pending"]) == (True, 1)


def test_duplicates_count_when_it_is_strict(url: str) -> None:
    [id_] = on(url, lambda outbox: delivered(outbox, "mail", 1))
    assert verify("mail", id_, id_)["duplicate"] == 1
    assert verify("mail", id_, id_, flags="--strict", status=1)["ok"] is False
    assert verify("mail", id_, flags="--strict")["ok"]


def test_a_replay_is_recorded_once_more(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "shop", 2, key="k")
        await outbox.admin.replay([UUID(ids[0])])
        await outbox.deliver("shop")
        return ids

    a, b = on(url, prepare)
    assert verify("shop", a, b, a, flags="--strict")["events"] == 2
    assert kinds(verify("shop", a, b, a, a)) == [("duplicate", a)]


def test_an_earlier_event_that_failed_may_be_missing_where_it_is_skipped(url: str, tmp_path: Path) -> None:
    async def prepare(outbox: Operated) -> str:
        _, second = outbox.emit("shop", key="k"), outbox.emit("shop", key="k")
        claim = await outbox.claim("shop")
        outcomes = (Failed("no"), Delivered())
        await outbox.store.settle(
            [Settlement(*pair) for pair in zip(claim.deliveries, outcomes, strict=True)]
        )
        return str(second)

    second = on(url, prepare)
    assert kinds(verify("shop", second, status=1)) == [("disorder", second)]
    skips = CONFIGURATION.replace("ordered = true", "ordered = true\non_failed = 'skip'")
    (tmp_path / "relaybox.toml").write_text(skips)
    assert verify("shop", second)["failed"] == 1


def test_what_is_older_than_what_is_kept_may_have_been_pruned(url: str) -> None:
    [id_] = on(url, lambda outbox: delivered(outbox, "mail", 1))
    week = datetime.now(UTC) - timedelta(days=7)
    ahead = id_at(week + timedelta(minutes=50))
    document = verify("mail", id_at(week - timedelta(days=1)), ahead, id_)
    assert (document["pruned"], document["phantom"]) == (2, 0), "an emitter's clock may be ahead"
    assert verify("mail", id_, id_at(week + timedelta(minutes=70)), status=1)["phantom"] == 1
    assert verify("mail", id_, uuid4(), status=1)["phantom"] == 1, "an id without a time"


def test_an_event_that_is_deleted_when_it_is_delivered_is_not_a_phantom(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "relaybox.toml").write_text(
        CONFIGURATION.replace("[destinations.mail]", "[destinations.mail]\nretention = 0")
    )
    on(url, lambda outbox: delivered(outbox, "mail", 1))
    [kept] = on(url, lambda outbox: delivered(outbox, "mail", 1))
    module = importlib.import_module("relaybox.cli.comparison")
    read = module.read

    async def traffic(outbox: Operated) -> None:
        id_ = outbox.emit("mail")
        await outbox.settle("mail", Delivered(keep=False))
        with (tmp_path / "recorded").open("a") as file:
            file.write(f"{id_}\n")

    def late(path: str, histories: Any) -> None:
        on(url, traffic)
        read(path, histories)

    monkeypatch.setattr(module, "read", late)
    document = verify("mail", kept, status=1)
    assert (document["pruned"], document["phantom"], document["lost"]) == (1, 0, 1)


def test_since_and_until_leave_out_what_was_emitted_before_and_after(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "mail", 3)
        outbox.change(UUID(ids[0]), created_at=datetime.now(UTC) - timedelta(minutes=30))
        outbox.change(UUID(ids[1]), created_at=datetime.now(UTC) - timedelta(minutes=10))
        return ids

    a, b, c = on(url, prepare)
    assert kinds(verify("mail", c, status=1)) == [("lost", a), ("lost", b)]
    assert kinds(verify("mail", c, status=1, flags="--since 20m")) == [("lost", b)]
    assert verify("mail", c, flags="--since 5m")["events"] == 1
    document = verify("mail", a, b, c, c, flags="--since 20m --until 5m")
    assert (document["events"], document["outside"]) == (1, 2), "a and c are known"
    document = verify("mail", str(uuid7()), a, flags="--until 5m --since 1d", status=1)
    assert kinds(document) == [("lost", b)]
    assert document["outside"] == 1


def test_a_comparison_of_nothing_is_reported_and_not_a_success(url: str) -> None:
    a, b = on(url, lambda outbox: delivered(outbox, "mail", 2))
    old, older = (id_at(datetime.now(UTC) - timedelta(days=days)) for days in (8, 9))
    assert (document := verify("mail", a, b, flags="--until 5m", status=1))["ok"] is False
    assert (document["events"], document["outside"]) == (0, 2)

    def verdict(*records: object, flags: str = "") -> str:
        output = relaybox("mail", "-", *flags.split(), input="\n".join(map(str, records)), status=1)
        return output.splitlines()[-1]

    nothing = "nothing was compared: "
    assert verdict(a, b, a, flags="--until 5m") == (
        f"{nothing}all of the 2 events that were recorded are outside --since and --until"
    )
    assert verdict(old, flags="--until 5m") == (
        f"{nothing}the one event that was recorded is older than what is kept (retention)"
    )
    assert verdict(a, old, older, uuid4(), flags="--until 5m") == (
        f"{nothing}4 events were recorded, 1 outside --since and --until, "
        "2 older than what is kept (retention), 1 without a row"
    )


def test_bytes_are_compared_in_base64_and_names_and_spaces_do_not_count(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        bytes_ = await delivered(outbox, "mail", 1, payload=b"\x00\xff")
        nested = await delivered(outbox, "mail", 1, payload={"b": [1, None, True], "a": "ü", "n": 1e2})
        return [*bytes_, *nested]

    data, nested = on(url, prepare)
    same = {"id": nested, "data": {"a": "\u00fc", "n": 100, "b": [1, None, True]}}
    assert verify("mail", {"id": data, "data_base64": "AP8="}, same)["payloads"] == 2
    other = {"id": nested, "data": {"a": "ü", "n": 100, "b": [1, None, 1]}}
    assert kinds(verify("mail", {"id": data, "data_base64": "AP8A"}, other, status=1)) == [
        ("altered", data),
        ("altered", nested),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "recorded: it is empty; expected an event id, or a JSON object with event_id"),
        (b"\n \n", "recorded: it is empty"),
        (b"{id}\nhello\n", "recorded, line 2: 'hello' is not an event id; expected an event id"),
        (b'{"id": 7}\n', "recorded, line 1: 7 is not an event id"),
        (b'{"order": 7}\n', "recorded, line 1: it has no id, only ['order']"),
        (b'{"id": \n', """recorded, line 1: '{"id":' is not JSON"""),
        (b'{"id": "{id}", "data_base64": "?"}', "recorded, line 1: data_base64 = '?' is not base64"),
        (b"[" * 100_000, "recorded, line 1: '[[["),
        (b'{"a":' + b"[" * 100_000, "is not JSON"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "recorded, line 1: b'\\x89PNG\\r\\n' is not UTF-8 text (byte 1)"),
        ("no\n".encode("utf-16"), "is not UTF-8 text"),
        (b"\x00\x00\n", "recorded, line 1: '\\x00\\x00' is not an event id"),
        (b"a" * (17 * 1024 * 1024), "recorded, line 1: it is longer than 16,777,216 bytes"),
    ],
)
def test_an_unreadable_record_is_reported_with_its_line(
    url: str, tmp_path: Path, content: bytes, complaint: str
) -> None:
    [id_] = on(url, lambda outbox: delivered(outbox, "mail", 1))
    (tmp_path / "recorded").write_bytes(content.replace(b"{id}", id_.encode()))
    output = relaybox("mail", "recorded", status=2)
    assert complaint in output
    assert output.count("\n") == 1
    assert len(output) < 400


def test_standard_input_is_a_file_too_and_a_text_may_be_as_windows_writes_it(url: str) -> None:
    a, b = on(url, lambda outbox: delivered(outbox, "mail", 2))
    assert "nothing is amiss" in relaybox("mail", "-", input=f"{a}\n{b}")
    assert "standard input, line 1: 'x' is not an event id" in relaybox("mail", "-", input="x", status=2)
    Path("recorded").write_bytes(b"\xef\xbb\xbf" + f'{a}\r\n\r\n"{b}"'.encode())
    assert "nothing is amiss" in relaybox("mail", "recorded")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["shpo", "recorded"], "no destination is called 'shpo'; did you mean 'shop'?"),
        (["mail", "nowhere"], "nowhere: no such file or directory; name a file"),
        (["mail", "."], ".: is a directory; name a file"),
        (["mail"], "say what was recorded: a file, or - for standard input, or --inbox CONSUMER"),
        (["mail", "recorded", "--inbox", "billing"], "say what was recorded"),
        (["mail", "recorded", "--since", "yesterday"], "--since = 'yesterday'"),
    ],
)
def test_wrong_usage_is_one_line(url: str, arguments: list[str], complaint: str) -> None:
    on(url, lambda outbox: delivered(outbox, "mail", 1))
    output = relaybox(*arguments, status=2)
    assert complaint in output
    assert output.count("\n") == 1


def test_a_terminal_gets_words(url: str, tmp_path: Path) -> None:
    ids = on(url, lambda outbox: delivered(outbox, "mail", 30))
    (tmp_path / "recorded").write_text("\n".join(ids[25:]))
    done = CliRunner().invoke(app, ["verify", "mail", "recorded", "--limit", "2"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "events              30  compared"
    assert lines[2] == "lost                25  delivered, but not recorded"
    assert lines[6].startswith(f"lost {ids[0]}: was emitted at 20")
    assert lines[8:] == ["lost: 23 more; --limit shows them", "25 differences"]
    assert lines[4].split()[:2] == ["disorder", "-"]
    assert lines[5].split()[:2] == ["altered", "-"]
    assert "no event of mail has an ordering key, so order was not compared" in done.stderr
    assert "no payload was recorded" in done.stderr


def test_the_last_line_counts_differences_and_duplicates(url: str) -> None:
    a, b = on(url, lambda outbox: delivered(outbox, "shop", 2, key="k"))

    def compare(*ids: str, status: int, flags: str = "") -> list[str]:
        return relaybox("shop", "-", *flags.split(), input="\n".join(ids), status=status).splitlines()

    lines = compare(a, b, a, status=0)
    assert lines[4].split()[:2] == ["disorder", "0"]
    assert lines[-2:] == [
        f"duplicate {a}: was recorded 2 times, first at line 1",
        "nothing is amiss; 1 duplicate",
    ]
    assert compare(a, b, a, status=1, flags="--strict")[-1] == "1 difference"
    assert compare(b, a, a, a, status=1)[-1] == "1 difference; 2 duplicates"


def test_a_stored_payload_that_is_not_json_is_a_difference(url: str) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "mail", 1)
        with outbox.engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
            connection.exec_driver_sql("UPDATE outbox_event SET payload = 'not json'")
        return ids

    [id_] = on(url, prepare)
    document = verify("mail", {"id": id_, "data": 1}, status=1)
    assert [finding["text"] for finding in document["findings"]] == [
        "came at line 1 with a payload; the stored one is not JSON"
    ]
    assert (document["altered"], document["payloads"], document["keyed"]) == (1, 1, 0)


def test_records_that_begin_later_are_reported(url: str, tmp_path: Path) -> None:
    async def prepare(outbox: Operated) -> list[str]:
        ids = await delivered(outbox, "mail", 2)
        outbox.change(UUID(ids[0]), created_at=datetime.now(UTC) - timedelta(minutes=30))
        return ids

    (tmp_path / "recorded").write_text(on(url, prepare)[1])
    done = CliRunner().invoke(app, ["verify", "mail", "recorded"])
    assert (
        "all that is lost is older than what was recorded: if records begin later, --since 20" in done.stderr
    )


def test_on_a_terminal_a_bar_shows_and_goes(url: str, tmp_path: Path) -> None:
    ids = on(url, lambda outbox: delivered(outbox, "mail", 100))
    (tmp_path / "recorded").write_text("\n".join(ids))
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "relaybox", "verify", "mail", "recorded"]
        done = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, timeout=60, check=True)
        assert b"nothing is amiss" in done.stdout
        assert b"reading" in os.read(ours, 100_000)
    finally:
        os.close(ours)
        os.close(theirs)
