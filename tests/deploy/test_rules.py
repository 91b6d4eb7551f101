"""The alert rules, by Prometheus's own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import available
from tests.deploy.pack import DEPLOY, ROOT, RULES, alerts
from tests.docs.failures import checks
from tests.servers import prometheus

PROMETHEUS = DEPLOY / "prometheus"
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
    """The path of Prometheus's own tool."""
    with available("Prometheus", prometheus.promtool()) as path:
        yield path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The directory, to change something in."""
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


def test_the_alerts_are_those_of_the_runbook_and_say_what_to_do() -> None:
    found: dict[str, set[str]] = {}
    with checks() as check:
        for alert in alerts():
            found.setdefault(alert["alert"], set()).add(alert["labels"]["severity"])
            with check(alert["alert"]):
                annotations = alert["annotations"]
                assert set(annotations) == {"summary", "description", "runbook"}
                assert annotations["description"].endswith(".")
                page = (ROOT / annotations["runbook"]).read_text()
                assert page.startswith(f"# {alert['alert']}\n")
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
