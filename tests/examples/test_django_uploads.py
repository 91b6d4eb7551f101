"""The example, started by its one command: by itself through an outage, and by a person with a browser."""

from __future__ import annotations

import runpy
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest
from playwright.sync_api import Locator, Page, expect

from relaybox.wire.signature import parse_keys, sign
from tests.examples.running import (
    EXAMPLES,
    PATIENCE,
    browsing,
    checked,
    found,
    interrupted,
    killed,
    picture,
    running,
    said,
    shows,
    tell,
)
from tests.waiting import wait_for

EXAMPLE = "django_uploads"


@pytest.mark.parametrize(("broker", "name"), [("redis", "Redis"), ("postgresql", "PostgreSQL")])
def test_the_example_works_through_an_outage(
    broker: str, name: str, directory: Path, request: pytest.FixtureRequest
) -> None:
    if broker == "redis":
        request.getfixturevalue("redis_url")
    printed = checked(EXAMPLE, directory, "--broker", broker, steps=4)
    assert f"Celery's broker is {name}." in printed


def test_a_person_sees_where_each_file_is(chromium_path: str, directory: Path, tmp_path: Path) -> None:
    with running(EXAMPLE, directory) as (process, output), browsing(chromium_path) as page:
        text = said(output, "Ctrl-C ends everything.")
        page.goto(found(r"The project: (\S+)", text))
        upload(page, tmp_path / "notes.txt", b"to be counted: five words")
        shows(row(page, "notes.txt"), "processed")
        upload(page, tmp_path / "picture.png", b"\x89PNG\r\n\x1a\n")
        shows(row(page, "picture.png"), "it is not text in UTF-8")
        press_enter(process, output, "The runner is away.")
        upload(page, tmp_path / "letter.txt", b"nobody reads this now")
        shows(page.get_by_role("main"), "The runner cannot be reached")
        shows(row(page, "letter.txt"), "tried again at")
        picture(page, "django-uploads.png")
        press_enter(process, output, "The runner is back.")
        shows(row(page, "letter.txt"), "processed")
        expect(page.get_by_text("The runner cannot be reached")).to_be_hidden(timeout=PATIENCE)
        replay(page, "notes.txt")
        shows(row(page, "notes.txt"), "delivered")
        log = Path(found(r"in (\S+) until the end", text)) / "runner.log"
        # Three that were stored, two that were processed, and the replay, which nothing is done for.
        wait_for(lambda: log.read_text().count('"POST /events') == 6, log.read_text)
        assert log.read_text().count("notes.txt: 5 words") == 1
        interrupted(process, directory)


def test_everything_ends_with_it_even_if_it_is_killed(directory: Path) -> None:
    with running(EXAMPLE, directory) as (process, output):
        said(output, "Ctrl-C ends everything.")
        # PostgreSQL, the runner, the web server, the worker and its two, beat; Redis where there is one.
        killed(process, others=7)


def test_the_runner_takes_only_what_is_signed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"SECRET": "secret", "TOKEN": "token", "URL": "http://127.0.0.1:1/"}.items():
        monkeypatch.setenv(f"RUNNER_{name}", value)
    monkeypatch.setenv("RUNNER_DATABASE", str(tmp_path / "runner.db"))
    receive = runpy.run_path(str(EXAMPLES / EXAMPLE / "runner.py"))["receive"]
    now, body = int(time.time()), b'{"type": "file.processed"}'
    unsigned = {"authorization": "Bearer token", "webhook-id": "1", "webhook-timestamp": str(now)}
    signed = unsigned | {"webhook-signature": sign(parse_keys("secret"), "1", now, body)}
    assert receive(signed, body) == (204, "")
    for wrong in (unsigned, signed | {"webhook-id": "2"}, signed | {"authorization": "Bearer other"}):
        assert receive(wrong, body)[0] == 401


def press_enter(process: subprocess.Popen[str], output: IO[str], answer: str) -> None:
    tell(process, "")
    said(output, answer)


def upload(page: Page, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    page.get_by_label("File").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    shows(row(page, file.name), file.name)


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name))


def replay(page: Page, name: str) -> None:
    """Have the event of a file sent once more, and come back to the page."""
    address = page.url
    row(page, name).get_by_role("link", name="delivered").click()
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill("admin")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("button", name="Replay").click()
    page.get_by_role("button", name="Replay", exact=True).click()
    shows(page.locator(".messagelist"), "Replayed 1 to runner.")
    page.goto(address)
