"""Takes the pictures of the document service again: ``python -m tests.examples.pictures``."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.browser.pictures import save
from tests.examples.running import browsing, found, running, said, shows, tell, temporary_directory
from tests.examples.test_documents import card, find, hits, write
from tests.servers import chromium

BIRDS = {
    "Kingfishers": "They sit on a branch over the river, and dive for fish.",
    "Herons": "They stand in shallow water and wait, for minutes, until a fish or a frog comes by.",
    "Reed warblers": "They build their nests between the stems, a hand above the water.",
}


def main() -> None:
    """Take all pictures: light and dark, and light while the engine is down."""
    with (
        temporary_directory() as directory,
        chromium.program() as program,
        running("documents", directory) as (process, output),
        browsing(program, height=560) as page,
    ):
        url = found(r"The documents: (\S+)", said(output, "Ctrl-C ends everything."))
        page.goto(url)
        for title, body in BIRDS.items():
            write(page, title, body)
            shows(card(page, title), "in search")
        find(page, "fish")
        shows(hits(page), "Kingfishers")
        page.get_by_role("button", name="Compare").click()
        shows(page.locator(".compare"), "100 %")
        take(page, "light")
        take(page, "dark")
        tell(process, "search")
        said(output, "search is dead.")
        write(page, "Otters", "They hunt for fish at dusk, and are seldom seen.")
        shows(card(page, "Otters"), "Connection refused")
        shows(page.locator("#engine"), "1 change waits")
        shows(page.locator("#found"), "Your documents are safe")
        take(page, "syncing")


def take(page: Page, name: str) -> None:
    """Take a picture of the whole page."""
    page.emulate_media(color_scheme="dark" if name == "dark" else "light")
    save(page.screenshot(animations="disabled", full_page=True), f"documents-{name}.png")


if __name__ == "__main__":
    main()
