"""The runbook has a page for each alert, and names commands and pages that exist."""

from __future__ import annotations

import re

import pytest

from relaybox.web.routes import ROUTES
from tests.deploy.pack import ROOT, RUNBOOK, alerts, check_command, commands_in
from tests.docs.failures import checks, line_at

PAGES = sorted(RUNBOOK.glob("*.md"))
GUIDES = ("deploy", "search", "backfill", "reindex", "reconcile", "rollout")
DOCUMENTS = [*PAGES, *(ROOT / "docs" / "how-to" / f"{name}.md" for name in GUIDES)]
PARTS = ["What it means", "Who is hurt", "Look first", "Fix", "Prevent"]


def test_an_alert_has_a_page_with_every_part_and_the_index_names_every_page() -> None:
    index = (RUNBOOK / "index.md").read_text()
    with checks() as check:
        for name in {alert["alert"] for alert in alerts()}:
            page = RUNBOOK / (re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() + ".md")
            with check(page):
                text = page.read_text()
                assert text.startswith(f"# {name}\n")
                assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
                first = text.partition("## Look first")[2].partition("## Fix")[0]
                assert list(commands_in(first)), "no command to look with"
        for page in PAGES:
            with check(page):
                assert page.name == "index.md" or f"]({page.name})" in index


def test_commands_pages_of_the_dashboard_and_links_lead_somewhere() -> None:
    known = {re.sub(r"\{\w+\}", "NAME", route.path) for route in ROUTES if route.method == "GET"}
    with checks() as check:
        for page in DOCUMENTS:
            text = page.read_text()
            for line, words in commands_in(text):
                with check(page, line):
                    try:
                        check_command(words)
                    except Exception as error:
                        # A guide may name a command without what it needs.
                        if page.parent == RUNBOOK or type(error).__name__ != "MissingParameter":
                            raise
            for named in re.finditer(r"`(/[a-z/A-Z-]*)`", text):
                with check(page, line_at(text, named.start())):
                    assert named[1] in known
            for link in re.finditer(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                with check(page, line_at(text, link.start())):
                    assert (page.parent / link[1]).exists(), link[1]


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    [(line, words)] = commands_in("Say\n`relaybox retry --no-such-option`.")
    assert line == 2
    with pytest.raises(Exception, match="--no-such-option"):
        check_command(words)
    with pytest.raises(AssertionError, match="no command 'frobnicate'"):
        check_command(["frobnicate"])
