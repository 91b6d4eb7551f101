"""A real Prometheus scrapes a real relay: every query of the dashboard has data, and every alert fires."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import sqlalchemy as sa
import yaml

from relaybox import Destination, Route
from tests.conftest import available
from tests.deploy.pack import DEPLOY, RULES, alerts, panels, rules
from tests.integration.project import Project
from tests.integration.shop import Shop
from tests.servers import base, prometheus
from tests.waiting import wait_for

APP = """
from relaybox import Event, Outbox, Reject, Retry

outbox = Outbox()

@outbox.handler("order.*", name="good")
async def good(event: Event) -> None:
    pass

@outbox.handler("order.*", name="flaky", backoff={"base": "50ms"}, poll_interval="50ms")
async def flaky(event: Event) -> None:
    if event.payload["n"] % 3 == 0:
        raise Reject("no")
    if event.payload["n"] % 3 == 1:
        raise Retry("not yet")
"""
SETTINGS = """
[relaybox]
database = "{database}"
app = "shop:outbox"

[destinations.dead]
sink = "http://127.0.0.1:1/events"
allow = ["127.0.0.0/8"]

[destinations.resting]
sink = "console:"

[[routes]]
events = "bulk.*"
to = "dead"

[web.users.prometheus]
token = "env:VIEWER"
role = "viewer"
"""
TOKEN = "a-token-that-prometheus-has"
BACKLOG = 10_100
VARIABLES = {"$outbox": ".*", "$destination": ".*", "$__rate_interval": "10s"}
EXPECTED = {
    ("OutboxBacklog", "warning", "dead"),
    ("OutboxBacklog", "critical", "dead"),
    ("OutboxProcessingStalled", "critical", "dead"),
    ("OutboxHighFailureRate", "warning", "flaky"),
    ("OutboxPublishErrors", "warning", "flaky"),
    ("OutboxOldestPending", "warning", "dead"),
    ("OutboxCircuitOpen", "warning", "dead"),
}
GONE = ("OutboxRelayMissing", "critical")
AWAY = ("OutboxDatabaseUnreachable", "critical")
SOON = {"interval": "1s", "for": "2s", "window": "[10s]"}
"""What the copy of the rules has instead of its minutes."""


class Prometheus:
    """The questions that are asked of a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self) -> set[tuple[str, str, str]]:
        """Return the name, the severity and the destination of each alert that fires."""
        return {
            (labels["alertname"], labels["severity"], labels.get("destination", ""))
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing" and (labels := alert["labels"])
        }

    def targets(self) -> list[str]:
        """Return the health of each target."""
        return [target["health"] for target in self._get("targets")["activeTargets"]]

    def _get(self, what: str, **parameters: str) -> Any:
        with urlopen(f"{self._url}/api/v1/{what}?{urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]


class Scene:
    """A shop, its relay and its web, and Prometheus that scrapes both."""

    def __init__(self, shop: Shop, relay: Project, web: Project) -> None:
        self.shop = shop
        self._relay = relay
        self._web = web
        self._ports = [base.free_port(), base.free_port()]
        self._n = 0

    def wait(self, reached: Callable[[], object], what: Callable[[], object]) -> None:
        """Place orders, of which the destination ``flaky`` takes a third, until it is so."""

        def look() -> object:
            self.shop.emit(30, keys=30, first=self._n)
            self._n += 30
            # Twice for each time that Prometheus scrapes.
            time.sleep(0.5)
            return reached()

        wait_for(look, lambda: str(what()), seconds=120)

    def logs(self) -> str:
        """Return the end of the two processes' logs."""
        return "\n".join(project.read("log")[-2_000:] for project in (self._relay, self._web))

    def hide(self, table: str) -> None:
        """Rename the table, so that the database does not answer."""
        with self.shop.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO elsewhere")

    @contextmanager
    def relay(self) -> Iterator[None]:
        with self._relay.running("relay", "--listen", f"127.0.0.1:{self._ports[0]}") as process:
            yield
            stop(process)

    @contextmanager
    def web(self) -> Iterator[None]:
        with self._web.running("web", "--port", str(self._ports[1]), VIEWER=TOKEN) as process:
            yield
            stop(process)

    @contextmanager
    def prometheus(self) -> Iterator[Prometheus]:
        files = {"prometheus.yml": configuration(*self._ports), "rules.yml": hasty_rules()}
        with available("Prometheus", prometheus.server(files | {"relaybox.token": TOKEN})) as url:
            yield Prometheus(url)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture
def scene(migrated_database: Callable[[str], str], tmp_path: Path) -> Iterator[Scene]:
    database = migrated_database("postgresql-18")
    projects = [Project(tmp_path / name) for name in ("relay", "web")]
    for project in projects:
        project.directory.mkdir()
        project.write("shop.py", APP)
        project.write("relaybox.toml", SETTINGS.format(database=database))
    projects[0].run("pause", "resting", "--reason", "nothing to do")
    names = ("good", "flaky", "dead")
    routes = [Route("order.*", to=["good", "flaky"]), Route("bulk.*", to="dead")]
    shop = Shop(
        database, destinations=[Destination(name, "memory:", max_attempts=2) for name in names], routes=routes
    )
    yield Scene(shop, *projects)
    shop.engine.dispose()


def configuration(*ports: int) -> str:
    """Return the example configuration, changed so that it works here."""
    example = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    example["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job, port in zip(example["scrape_configs"], ports, strict=True):
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    _, web = example["scrape_configs"]
    web["authorization"]["credentials_file"] = "relaybox.token"
    return yaml.safe_dump(example)


def hasty_rules() -> str:
    """Return the rules with seconds instead of minutes, and otherwise as they are."""
    text = re.sub(r"\[\dm\]", SOON["window"], RULES.read_text())
    text = text.replace("> 120", "> 7")
    text = re.sub(r"\bfor: \d+m", f"for: {SOON['for']}", text)
    return text.replace("interval: 30s", f"interval: {SOON['interval']}")


def queries() -> list[str]:
    """Return every query of the dashboard, with everything chosen."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    for variable, value in VARIABLES.items():
        shown = [expression.replace(variable, value) for expression in shown]
    return shown


def numbers(samples: list[dict[str, Any]]) -> list[float]:
    return [number for sample in samples if math.isfinite(number := float(sample["value"][1]))]


def fill_the_dead(scene: Scene) -> None:
    """Add a backlog, twenty minutes old, for a destination that does not exist."""
    scene.shop.emit(BACKLOG, keys=BACKLOG, event_type="bulk.sent")
    event = scene.shop.outbox.tables.event
    old = sa.func.now() - sa.text("interval '20 minutes'")
    with scene.shop.engine.begin() as connection:
        connection.execute(sa.update(event).where(event.c.destination == "dead").values(created_at=old))


def test_every_query_of_the_dashboard_has_data_and_every_alert_fires(scene: Scene) -> None:
    fill_the_dead(scene)
    with scene.prometheus() as server, scene.web():
        with scene.relay():
            missing = queries()

            def answered() -> bool:
                missing[:] = [query for query in missing if not numbers(server.query(query))]
                return not missing

            scene.wait(answered, lambda: (missing, scene.logs()))
            scene.wait(lambda: server.firing() >= EXPECTED, lambda: EXPECTED - server.firing())
            assert not {
                name for name, _, destination in server.firing() if destination in ("good", "resting")
            }
            scene.wait(lambda: server.targets() == ["up", "up"], server.targets)
            scene.wait(lambda: not wrong_values(server), lambda: wrong_values(server))
        # The web says that there is no relay.
        wait_for(lambda: (*GONE, "") in server.firing(), lambda: str(server.firing()))
        scene.hide("outbox_event")
        wait_for(lambda: (*AWAY, "") in server.firing(), lambda: str(server.firing()))


def wrong_values(server: Prometheus) -> list[str]:
    """Return the metrics that are not in these limits in both processes; each may be seconds behind."""
    limits = {
        # Beyond 10,000 it is counted once a minute.
        'outbox_pending_messages{destination="dead"}': (10_001, BACKLOG),
        'outbox_pending_events{destination="dead"}': (10_001, BACKLOG),
        'outbox_due_messages{destination="dead"}': (9_900, BACKLOG),
        'outbox_oldest_pending_seconds{destination="dead"}': (1_200, 4_800),
        'outbox_circuit_open{destination="dead"}': (1, 1),
        'outbox_circuit_open{destination="good"}': (0, 0),
        'outbox_failed_messages{destination="flaky"}': (1, math.inf),
        'outbox_failed_events{destination="flaky"}': (1, math.inf),
        'outbox_failed_messages{destination="good"}': (0, 0),
        'outbox_paused{destination="resting"}': (1, 1),
        'outbox_paused{destination="good"}': (0, 0),
        "outbox_relays": (1, 1),
    }
    found = {query: (numbers(server.query(query)), 2, *ends) for query, ends in limits.items()}
    # Of three: one delivered, one failed at once, one tried twice.
    ratio = 'outbox:failure_ratio:rate5m{destination="flaky"}'
    found[ratio] = (numbers(server.query(ratio)), 1, 0.6, 0.9)
    return [
        f"{query} = {values}"
        for query, (values, count, least, most) in found.items()
        if len(values) != count or not all(least <= number <= most for number in values)
    ]


def test_every_alert_is_waited_for() -> None:
    named = {(alert["alert"], alert["labels"]["severity"]) for alert in alerts()}
    assert {alert[:2] for alert in EXPECTED} | {GONE, AWAY} == named


def test_the_hasty_copy_is_the_rules() -> None:
    hasty = [rule for group in yaml.safe_load(hasty_rules())["groups"] for rule in group["rules"]]
    assert [re.sub(r"\[\w+\]", "[]", rule["expr"]) for rule in hasty] == [
        re.sub(r"\[\w+\]", "[]", rule["expr"]).replace("> 120", "> 7") for rule in rules()
    ]
    assert {rule["for"] for rule in hasty if "for" in rule} == {SOON["for"]}
