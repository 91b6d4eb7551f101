"""The runbook has a page for each alert, and names commands and pages that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relaybox.web.routes import ROUTES
from tests.deploy.pack import ROOT, RUNBOOK, alerts, check_command, commands_in

PAGES = sorted(RUNBOOK.glob("*.md"))
GUIDES = ("deploy", "search", "backfill", "reindex", "reconcile", "rollout")
DOCUMENTS = [*PAGES, *(ROOT / "docs" / "how-to" / f"{name}.md" for name in GUIDES)]
PARTS = ["What it means", "Who is hurt", "Look first", "Fix", "Prevent"]
COMMANDS = [(page, words) for page in DOCUMENTS for words in commands_in(page.read_text())]


@pytest.mark.parametrize("name", sorted({alert["alert"] for alert in alerts()}))
def test_an_alert_has_a_page_with_every_part(name: str) -> None:
    page = RUNBOOK / (re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() + ".md")
    text = page.read_text()
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
    first = text.partition("## Look first")[2].partition("## Fix")[0]
    assert list(commands_in(first)), "no command to look with"
    assert f"]({page.name})" in (RUNBOOK / "index.md").read_text()


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else value.name
)
def test_a_command_of_the_runbook_is_one_that_there_is(page: Path, words: list[str]) -> None:
    try:
        check_command(words)
    except Exception as error:
        # A guide may name a command without what it needs.
        if page.parent == RUNBOOK or type(error).__name__ != "MissingParameter":
            raise


def test_a_command_that_there_is_not_would_be_noticed() -> None:
    [words] = commands_in("Say `relaybox retry --no-such-option`.")
    with pytest.raises(Exception, match="--no-such-option"):
        check_command(words)
    with pytest.raises(AssertionError, match="no command 'frobnicate'"):
        check_command(["frobnicate"])


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_a_page_of_the_dashboard_that_is_named_is_one_that_there_is(page: Path) -> None:
    known = {re.sub(r"\{\w+\}", "NAME", route.path) for route in ROUTES if route.method == "GET"}
    assert set(re.findall(r"`(/[a-z/A-Z-]*)`", page.read_text())) <= known


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_names_every_page() -> None:
    index = (RUNBOOK / "index.md").read_text()
    for page in PAGES:
        assert page.name == "index.md" or f"]({page.name})" in index, page.name
