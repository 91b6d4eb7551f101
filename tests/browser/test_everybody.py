"""Pages by screen reader, by keyboard, in the dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from playwright.sync_api import Page, expect

from relaybox.web import dashboard
from tests.browser import seed
from tests.browser.site import PAGES, go, served
from tests.databases import engine

OpenPage = Callable[..., Page]
CHECKS = (Path(__file__).parent / "checks.js").read_text()
FOCUS = "document.activeElement.textContent.trim()"


@pytest.fixture(scope="module")
def address(module_database: Callable[[str], str]) -> Iterator[str]:
    """Serve a shop that has a day of data."""
    database = module_database("postgresql-18")
    outbox = seed.shop(database)
    seed.fill(outbox, engine(database))
    with served(dashboard(outbox)) as address:
        yield address


def test_every_page_has_names_landmarks_and_contrast(address: str, open_page: OpenPage) -> None:
    page = open_page()
    found = {}
    for name in [*PAGES, "login"]:
        go(page, address, name)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if wrong := page.evaluate(CHECKS):
                found[name, scheme] = wrong
    assert found == {}


def test_the_checks_see_what_is_wrong(address: str, open_page: OpenPage) -> None:
    page = open_page()
    page.goto(f"{address}/destinations/billing")
    page.evaluate("document.querySelector('label').replaceWith(document.querySelector('label input'))")
    page.evaluate("document.styleSheets[0].insertRule('h1 { color: #999 }', 0)")
    wrong = page.evaluate(CHECKS)
    assert any(one.startswith("no label") for one in wrong)
    assert any(one.startswith("contrast") for one in wrong)


STICKS_OUT = """
Math.max(0, ...[...document.querySelectorAll('.card')].flatMap(card =>
    [...card.querySelectorAll('table, form, pre')].map(
        one => Math.floor(one.getBoundingClientRect().right - card.getBoundingClientRect().right))))
"""


@pytest.mark.parametrize("width", [360, 750, 900, 1024, 1280])
def test_nothing_sticks_out_of_its_card(address: str, open_page: OpenPage, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 740}, is_mobile=width < 700)
    found = {}
    for name in PAGES:
        go(page, address, name)
        if page.evaluate(STICKS_OUT) or page.evaluate("document.documentElement.scrollWidth") > width:
            found[name] = page.evaluate(STICKS_OUT)
    assert found == {}


def test_a_group_is_reached_by_keyboard_alone(address: str, open_page: OpenPage) -> None:
    page = open_page()
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS) == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    reach(page, "Failures")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Failures")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    reach(page, "Retry group…")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Retry")
    reach(page, "Cancel")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Failures")


def reach(page: Page, text: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUS).startswith(text):
            return
    raise AssertionError(f"Tab never comes to {text!r}")


def test_what_is_not_there_is_said_kindly(address: str, open_page: OpenPage) -> None:
    page = open_page(expected=("404", "400"))
    for path in ("/nowhere", "/events/no-id", f"/events/{UUID(int=7)}", "/destinations/nobody"):
        page.goto(address + path)
        expect(page.get_by_role("link", name="To the overview")).to_be_visible()
        assert page.evaluate(CHECKS) == []
    page.goto(f"{address}/events?status=unheard&event_id=x")
    expect(page.get_by_role("alert")).to_contain_text("State")
