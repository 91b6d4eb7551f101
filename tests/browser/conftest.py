"""A browser, and pages that tell of everything that went wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from relaybox.web import live
from relaybox.web.settings import TOKEN
from tests.browser import site as sites

PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Browser]:
    """Chromium, without a window."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(autouse=True, scope="package")
def local_token() -> Iterator[None]:
    """Set the token with which an outbox without users lets in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, sites.LOCAL)
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the database more often than every two seconds, to spare the tests the time."""
    monkeypatch.setattr(live, "ROUND", 0.25)


@pytest.fixture
def site(migrated_database: Callable[[str], str]) -> Iterator[sites.Site]:
    """Start a shop that needs no login."""
    with sites.running(migrated_database("postgresql-18")) as site:
        yield site


@pytest.fixture
def guarded_site(migrated_database: Callable[[str], str]) -> Iterator[sites.Site]:
    """Start a shop with an operator and a viewer."""
    with sites.running(migrated_database("postgresql-18"), sites.USERS) as site:
        yield site


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; at the end none of them may have written to the console, or have thrown."""
    complaints: list[str] = []
    with ExitStack() as contexts:

        def opened(**options: Any) -> Page:
            expected = options.pop("expected", ())
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
            contexts.callback(context.close)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()

            def complain(kind: str, text: str) -> None:
                if not any(one in text for one in expected):
                    complaints.append(f"{kind}: {text}")

            def heard(message: ConsoleMessage) -> None:
                if message.type in ("error", "warning"):
                    complain(message.type, message.text)

            page.on("console", heard)
            page.on("pageerror", lambda error: complain("error", str(error)))
            page.on("dialog", lambda dialog: (complain("dialog", dialog.message), dialog.dismiss()))
            return page

        yield opened
    assert complaints == []
