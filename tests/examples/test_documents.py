"""The document service, started by its one command: by itself through an outage, and by a person."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.examples.running import (
    PATIENCE,
    browsing,
    check,
    checked,
    found,
    interrupted,
    killed,
    running,
    said,
    shows,
    tell,
    temporary_directory,
)
from tests.servers import meilisearch

EXAMPLE = "documents"
CHECKS = (Path(__file__).parents[1] / "browser" / "checks.js").read_text()
"""What a page owes to those who do not see it, or not well."""


@pytest.mark.parametrize("engine", ["opensearch", "meilisearch", "algolia"])
def test_the_index_follows_every_change_through_an_outage(engine: str, directory: Path) -> None:
    printed = checked(EXAMPLE, directory, "--engine", engine, steps=12)
    assert printed.endswith("followed every change.\n")


@pytest.mark.skipif("MEILISEARCH_URL" in os.environ, reason="the engine is somebody's, and not to be killed")
def test_a_person_sees_what_waits_for_the_engine_and_finds_it_when_it_is_back(
    chromium_path: str, directory: Path
) -> None:
    with running(EXAMPLE, directory) as (process, output):
        url = found(r"The documents: (\S+)", said(output, "Ctrl-C ends everything."))
        with browsing(chromium_path) as page:
            page.goto(url)
            write(page, "Herons", "They wait for fish.")
            shows(card(page, "Herons"), "in search")
            find(page, "fish")
            shows(hits(page), "Herons")
            tell(process, "search")
            said(output, "search is dead.")
            write(page, "Otters", "They hunt for fish.")
            shows(card(page, "Otters"), "syncing")
            shows(card(page, "Otters"), "Connection refused")
            shows(page.locator("#engine"), "is down: 1 change waits")
            shows(page.locator("#found"), "Your documents are safe")
            tell(process, "search")
            said(output, "search runs.")
            shows(card(page, "Otters"), "in search")
            shows(page.locator("#engine"), "is up: nothing waits")
            shows(hits(page), "Otters")
        # PostgreSQL, the engine and the service.
        killed(process, others=3)


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """Run a service for several tests, one after the other; yield its address."""
    with (
        temporary_directory() as directory,
        running(EXAMPLE, directory, "--engine", "meilisearch") as (_, output),
    ):
        yield said(output, "Ctrl-C ends everything.")


@pytest.fixture
def page(service: str, chromium_path: str) -> Iterator[Page]:
    """Open a page of that service, which has no document before and after the test."""
    with browsing(chromium_path) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(found(r"The documents: (\S+)", service))
        shows(page.locator("#engine"), "is up: nothing waits")
        expect(page.locator("#empty")).to_be_visible(timeout=PATIENCE)
        yield page
        for one in page.request.get(f"{page.url}documents").json():
            gone = page.request.delete(f"{page.url}documents/{one['id']}", params={"version": one["version"]})
            assert gone.status == 204


def test_bad_input_is_reported_and_markup_is_shown_as_it_was_written(page: Page) -> None:
    write(page, " ", "a text without a title")
    shows(page.locator("#new [role=alert]"), "The title is missing.")
    write(page, "t" * 201, "")
    shows(page.locator("#new [role=alert]"), "The title is too long: 200 characters are the most.")
    write(page, "<b>Newts</b>", "They live in ponds.")
    shows(card(page, "<b>Newts</b>"), "in search")
    find(page, "pon")
    shows(hits(page), "<b>Newts</b>")
    expect(hits(page).locator("mark")).to_have_text("pon", timeout=PATIENCE)


def test_of_two_who_edit_the_second_gets_an_error_and_the_index_follows_the_first(page: Page) -> None:
    write(page, "Newts", "They live in ponds.")
    other = another(page)
    open_editor(other, "Newts")
    edit(page, "Newts", "They live in lakes.")
    find(page, "lakes")
    shows(hits(page), "They live in lakes.")
    save(other)
    shows(other.locator("#documents"), "Somebody has changed this document meanwhile.")
    other.get_by_role("button", name="Cancel").click()
    shows(card(other, "Newts"), "They live in lakes.")
    open_editor(other, "Newts")
    card(page, "Newts").get_by_role("button", name="delete").click()
    shows(page.locator("#found"), "Nothing found.")
    expect(page.locator("#documents li")).to_have_count(0, timeout=PATIENCE)
    save(other)
    shows(other.locator("#documents"), "This document is gone: somebody has deleted it.")
    page.get_by_role("button", name="Compare").click()
    shows(page.locator(".compare"), "100 % the same (0 in the database)")


def test_a_document_that_the_engine_refuses_is_reported_and_can_be_sent_again(
    page: Page, service: str
) -> None:
    refuse_one(found(r"Meilisearch \(imitated\) at (\S+)\.", service))
    write(page, "Toads", "They are brown.")
    shows(card(page, "Toads"), "failed")
    shows(card(page, "Toads"), "The engine refused it:")
    shows(page.locator("#engine"), "1 failed")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CHECKS) == []
    card(page, "Toads").get_by_role("button", name="Why?").click()
    shows(card(page, "Toads"), "failed at")
    card(page, "Toads").get_by_role("button", name="Try again").click()
    shows(card(page, "Toads"), "in search")
    find(page, "brown")
    shows(hits(page), "Toads")


def test_ctrl_c_ends_everything_and_leaves_nothing(directory: Path) -> None:
    with running(EXAMPLE, directory, "--engine", "meilisearch") as (process, output):
        said(output, "The service runs")
        interrupted(process, directory)


def test_an_index_that_is_there_already_is_left_alone(directory: Path) -> None:
    with meilisearch.imitation() as server:
        server.ask("POST", "/indexes", {"uid": "documents", "primaryKey": "id"})
        url = meilisearch.destination_url(server, "documents")
        done = check(EXAMPLE, directory, "--search", url, SEARCH_KEY=server.key)
        assert done.returncode == 1
        assert "the index 'documents' is there already" in done.stderr
        assert list(directory.iterdir()) == []
        assert [index["uid"] for index in server.ask("GET", "/indexes")["results"]] == ["documents"]


def another(page: Page) -> Page:
    browser = page.context.browser
    assert browser is not None
    other = browser.new_page()
    other.set_default_timeout(PATIENCE)
    other.goto(page.url)
    return other


def refuse_one(address: str) -> None:
    """Have the engine refuse the next document."""
    fault = {"tasks": [{"code": "invalid_document_id", "count": 1, "type": "documentAdditionOrUpdate"}]}
    headers = {"authorization": f"Bearer {meilisearch.KEY}", "content-type": "application/json"}
    urlopen(Request(f"http://{address}/__faults", json.dumps(fault).encode(), headers), timeout=10).close()


def write(page: Page, title: str, body: str) -> None:
    form = page.locator("#new")
    form.get_by_label("Title").fill(title)
    form.get_by_label("Text").fill(body)
    form.get_by_role("button", name="Save").click()


def open_editor(page: Page, title: str) -> None:
    card(page, title).get_by_role("button", name="edit").click()


def save(page: Page) -> None:
    page.locator("#documents form").get_by_role("button", name="Save").click()


def edit(page: Page, title: str, body: str) -> None:
    open_editor(page, title)
    field = page.locator("#documents form").get_by_label("Text")
    field.clear()
    field.press_sequentially(body)
    save(page)
    expect(page.locator("#documents form")).to_have_count(0, timeout=PATIENCE)


def find(page: Page, words: str) -> None:
    page.get_by_label("Words to find").fill(words)


def hits(page: Page) -> Locator:
    return page.get_by_role("list", name="What was found")


def card(page: Page, title: str) -> Locator:
    return page.locator("#documents > li").filter(has=page.get_by_role("heading", name=title, exact=True))
