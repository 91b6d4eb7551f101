"""The alert rules, by Prometheus's own tool, and the runbook, whose commands and links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaybox.web.routes import ROUTES
from tests.conftest import available
from tests.deploy.pack import DEPLOY, ROOT, RULES, RUNBOOK, alerts, check_command, commands_in
from tests.docs.failures import checks, line_at
from tests.servers import prometheus

PROMETHEUS = DEPLOY / "prometheus"
PAGES = sorted(RUNBOOK.glob("*.md"))
GUIDES = ("deploy", "search", "backfill", "reindex", "reconcile", "rollout")
DOCUMENTS = [*PAGES, *(ROOT / "docs" / "how-to" / f"{name}.md" for name in GUIDES)]
PARTS = ["What it means", "Who is hurt", "Look first", "Fix", "Prevent"]
NAMES = {
    "OutboxBacklog": {"warning", "critical"},
    "OutboxProcessingStalled": {"critical"},
    "OutboxHighFailureRate": {"warning"},
    "OutboxPublishErrors": {"warning"},
    "OutboxOldestPending": {"warning"},
    "OutboxCircuitOpen": {"warning"},
    "OutboxRelayMissing": {"critical"},
    "OutboxDatabaseUnreachable": {"critical"},
}


@pytest.fixture(scope="module")
def promtool() -> Iterator[str]:
    """Return the path of Prometheus's own tool."""
    with available("Prometheus", prometheus.promtool()) as path:
        yield path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the directory, for changes."""
    return Path(shutil.copytree(PROMETHEUS, tmp_path / "prometheus"))


def run(*command: str, cwd: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_promtool_is_content(promtool: str) -> None:
    for arguments in (
        "check config --syntax-only prometheus.yml",
        "check rules --lint=all --lint-fatal rules.yml",
        "test rules rules_test.yml",
    ):
        done = run(promtool, *arguments.split())
        assert done.returncode == 0, done


def test_every_alert_has_its_severities_and_a_page_of_the_runbook_with_every_part() -> None:
    found: dict[str, set[str]] = {}
    index = (RUNBOOK / "index.md").read_text()
    with checks() as check:
        for alert in alerts():
            name, annotations = alert["alert"], alert["annotations"]
            found.setdefault(name, set()).add(alert["labels"]["severity"])
            page = RUNBOOK / (re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() + ".md")
            with check(page):
                assert set(annotations) == {"summary", "description", "runbook"}
                assert annotations["description"].endswith(".")
                assert ROOT / annotations["runbook"] == page
                text = page.read_text()
                assert text.startswith(f"# {name}\n")
                assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
                first = text.partition("## Look first")[2].partition("## Fix")[0]
                assert list(commands_in(first)), "no command to look with"
        for page in PAGES:
            with check(page):
                assert page.name == "index.md" or f"]({page.name})" in index
    assert found == NAMES
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        assert group["interval"] == "30s"


def test_each_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    cases = [
        case
        for test in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    fires = {
        (case["alertname"], alert["exp_labels"]["severity"]) for case in cases for alert in case["exp_alerts"]
    }
    assert fires == {(name, severity) for name, severities in NAMES.items() for severity in severities}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert quiet == set(NAMES)


def other_threshold(alert: dict[str, Any]) -> None:
    alert["expr"] = re.sub(r"([<>]) ", r"\1 -1 + 3 * ", alert["expr"])


def no_wait(alert: dict[str, Any]) -> None:
    alert["for"] = "1s"


# The two alerts of one name are next to each other: only one of them is changed at a time.
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("change", [other_threshold, no_wait])
def test_the_rules_tests_notice_a_changed_rule(
    change: Callable[[dict[str, Any]], None], half: int, promtool: str, copy: Path
) -> None:
    rules = yaml.safe_load((copy / "rules.yml").read_text())
    every = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    changed = [alert for alert in every[half::2] if change is other_threshold or "for" in alert]
    for alert in changed:
        change(alert)
    (copy / "rules.yml").write_text(yaml.safe_dump(rules))
    done = run(promtool, "test", "rules", "rules_test.yml", cwd=copy)
    assert set(re.findall(r"alertname: (\w+)", done.stderr)) == {alert["alert"] for alert in changed}, done


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
