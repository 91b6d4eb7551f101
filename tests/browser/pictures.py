"""Takes the pictures of the documentation again: ``python -m tests.browser.pictures``."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from relaybox.web import dashboard
from tests.browser import seed
from tests.browser.site import PAGES, follow, go, served
from tests.databases import engine as engine_of
from tests.servers import chromium, fresh, postgres18

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LARGEST = 150_000


def take(page: Page, name: str, height: int) -> None:
    """Take a picture of the page down to this height."""
    picture = page.screenshot(
        animations="disabled",
        full_page=True,
        clip={"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height},
    )  # type: ignore[index]
    save(picture, f"dashboard-{name}.png")


def save(picture: bytes, name: str) -> None:
    """Write a picture in few enough colours to be small."""
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    path = IMAGES / name
    few.save(path, optimize=True)
    assert path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size:,} bytes"


def main() -> None:
    """Take all pictures, light and dark, and some on a phone."""
    with postgres18.server() as server, fresh.migrated(server) as database, chromium.program() as program:
        outbox = seed.shop(database)
        engine = engine_of(database)
        seed.fill(outbox, engine)
        users = {"ada": {"token": "an-operators-token", "role": "operator"}}
        with served(dashboard(outbox, users=users)) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=scheme)  # type: ignore[arg-type]
                page.goto(f"{address}/login")
                page.wait_for_timeout(200)
                take(page, f"login-{scheme}", 460)
                page.get_by_label("Token").fill("an-operators-token")
                follow(page, page.get_by_role("button", name="Log in"))
                for name in PAGES:
                    with engine.begin() as connection:
                        seed.see_relays(connection, outbox)
                    go(page, address, name)
                    page.wait_for_timeout(400)
                    tall = page.evaluate(
                        "Math.ceil(document.querySelector('main').getBoundingClientRect().bottom + scrollY)"
                    )
                    take(page, f"{name}-{scheme}", max(520, min(tall, 1240)))
                state = page.context.storage_state()
                page.close()
                phone = browser.new_context(
                    viewport={"width": 360, "height": 740}, color_scheme=scheme, storage_state=state
                )  # type: ignore[arg-type]
                page = phone.new_page()
                for name in ("overview", "failures"):
                    go(page, address, name)
                    page.wait_for_timeout(400)
                    take(page, f"phone-{name}-{scheme}", 900)
                phone.close()
            browser.close()


if __name__ == "__main__":
    main()
