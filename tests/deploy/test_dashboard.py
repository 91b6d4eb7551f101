"""The dashboard for Grafana, without a Grafana: its shape, and the thresholds that it promises."""

from __future__ import annotations

import re
from typing import Any

from tests.deploy.pack import dashboard, panels, rules
from tests.docs.failures import checks

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
THRESHOLDS = {"outbox_pending_messages": 100, "failure": 0.01, "outbox_publish_latency_seconds": 5}
"""Where the colour changes, by what a panel is about."""


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_a_panel_is_whole() -> None:
    with checks() as check:
        for panel in panels():
            with check(f"{panel['id']} {panel['title']}"):
                assert panel["type"] in ("stat", "timeseries", "state-timeline")
                assert panel["title"]
                assert panel["description"].endswith(".")
                defaults = panel["fieldConfig"]["defaults"]
                assert defaults["unit"] in ("short", "s", "ops", "percentunit")
                first, *values = [step["value"] for step in defaults["thresholds"]["steps"]]
                assert (first, values) == (None, sorted(values))
                targets = panel["targets"]
                assert [target["refId"] for target in targets] == list("ABC")[: len(targets)]
                assert all(each["datasource"] == DATASOURCE for each in (panel, *targets))


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_what_is_normal_ends_at_the_promised_thresholds() -> None:
    def about(panel: dict[str, Any], what: str) -> bool:
        if what == "failure":
            return bool(panel["title"] == "Failure rate")
        return any(what in target["expr"] for target in panel["targets"])

    for what, value in THRESHOLDS.items():
        shown = [panel for panel in panels() if about(panel, what)]
        assert len(shown) == 2, what
        for panel in shown:
            first, second, *_ = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            assert first["color"] == "green"
            assert second["value"] == value
            assert second["color"] != "green"


def test_every_metric_of_the_rules_is_on_the_dashboard() -> None:
    named = set(re.findall(r"outbox_\w+", " ".join(rule["expr"] for rule in rules())))
    shown = set(re.findall(r"outbox_\w+", " ".join(expressions())))
    assert named <= shown


def test_each_query_heeds_the_variables_and_the_variables_use_the_chosen_source() -> None:
    known = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert list(known) == ["datasource", "outbox", "destination"]
    assert known["datasource"]["type"] == "datasource"
    assert known["datasource"]["query"] == "prometheus"
    for name in ("outbox", "destination"):
        assert known[name]["datasource"] == DATASOURCE
        # Chosen are also series without such a label.
        assert known[name]["allValue"] == ".*"
    for expression in expressions():
        selectors = re.findall(r"\boutbox_\w+(\{[^}]*\})?", expression.replace("by (outbox, ", "by ("))
        assert selectors
        assert all('outbox=~"$outbox"' in selector for selector in selectors), expression


def test_of_gauges_the_largest_counts_and_counters_are_summed() -> None:
    for expression in expressions():
        uses = re.findall(r"(\S+ ?\S*(?: by \([^)]*\))? ?\(\S*?)\b(outbox_\w+)\{", expression)
        assert uses
        for before, metric in uses:
            if metric.endswith(("_total", "_bucket")):
                assert re.search(r"sum( by \([^)]*\))? ?\(rate\($", before), expression
            else:
                assert re.search(r"max( by \([^)]*\))? ?\($", before), expression


def test_it_says_what_grafana_needs_to_import_it() -> None:
    whole = dashboard()
    assert whole["schemaVersion"] >= 36
    assert re.fullmatch(r"[a-z0-9-]{1,40}", whole["uid"])
    assert "id" not in whole
    assert "NOT RUN" in whole["description"]
