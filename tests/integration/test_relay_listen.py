"""``relaybox relay --listen``: metrics, livez and readyz of a running relay."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relaybox import Destination
from tests.integration.project import Project
from tests.integration.shop import Databases, Shop, shop_for
from tests.waiting import PATIENCE

pytestmark = pytest.mark.full

APP = """
from relaybox import Event, Outbox, Reject, Retry

outbox = Outbox()

@outbox.handler("order.*", name="on_order", poll_interval="50ms", backoff={"base": "50ms"})
def on_order(event: Event) -> None:
    number = event.payload["n"]
    if number == 13:
        raise Reject("unlucky")
    if number == 7 and event.attempt == 1:
        raise Retry("once more")
"""


class Page:
    """What a relay's pages answer."""

    def __init__(self, project: Project) -> None:
        project.until(lambda: "serving /metrics" in project.read("log"))
        found = re.search(r"at (http://\S+)", project.read("log"))
        assert found
        self.url = found[1]

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> dict[str, Any]:
        status, body = self.get("/readyz")
        found = json.loads(body)
        assert found["ready"] == (status == 200)
        return dict(found)

    def value(self, name: str, **labels: str) -> float | None:
        """Return a sample of the metrics."""
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("shop.py", APP)
    return project


@pytest.fixture
def shop(project: Project, migrated_database: Databases) -> Shop:
    url = migrated_database("postgresql-18")
    project.write("relaybox.toml", f'[relaybox]\ndatabase = "{url}"\napp = "shop:outbox"\n')
    shop = Shop(url)
    shop.outbox.handler("order.*", name="on_order")(print)
    return shop


@pytest.mark.fast
def test_a_relay_shows_what_it_does(shop: Shop, project: Project) -> None:
    shop.emit(20, keys=20)
    with project.running("relay", "--listen", "0"):
        page = Page(project)
        delivered = {"event_type": "order.paid", "status": "delivered"}
        project.until(lambda: page.value("outbox_events_total", **delivered) == 19)
        assert page.value("outbox_events_total", event_type="order.paid", status="failed") == 1
        assert page.value("outbox_events_total", event_type="order.paid", status="retried") == 1
        errors = {"destination": "on_order"}
        assert page.value("outbox_publish_errors_total", error_type="Reject", **errors) == 1
        assert page.value("outbox_publish_latency_seconds_count", **errors) == 19
        assert page.value("outbox_processing_duration_seconds_count", **errors) == 21
        project.until(lambda: page.value("outbox_failed_messages", **errors) == 1)
        assert page.value("outbox_pending_messages", **errors) == 0
        assert page.value("outbox_circuit_open", **errors) == 0
        assert page.value("outbox_relays") == 1
        assert page.value("process_cpu_seconds_total") is not None
        assert page.get("/livez") == (200, '{"alive":true}')
        project.until(lambda: page.ready() == {"ready": True, "problems": []})
        assert page.get("/else")[0] == 404
        port = page.url.rpartition(":")[2]
        refused = project.run("relay", "--listen", port, status=2)
        assert refused.count("\n") == 1
        assert f"--listen = '{port}': another process listens there" in refused


def test_listening_goes_with_a_relay_that_goes_on(shop: Shop, project: Project) -> None:
    assert "leave it out with --once" in project.run("relay", "--once", "--listen", "0", status=2)
    assert "write HOST:PORT" in project.run("relay", "--listen", "nowhere", status=2)


def test_a_missing_package_is_one_line(shop: Shop, project: Project) -> None:
    without = "import sys; sys.modules['prometheus_client'] = None; from relaybox.cli import main; main()"
    refused = project.run("relay", "--listen", "0", status=2, command=(sys.executable, "-c", without))
    assert refused.count("\n") == 1
    assert "prometheus-client is not installed: pip install 'relaybox[metrics]'" in refused


def test_a_dead_destination_shows_at_once(project: Project, migrated_database: Databases) -> None:
    url = migrated_database("postgresql-18")
    dead = "http://127.0.0.1:1/"
    project.write(
        "relaybox.toml",
        f'[relaybox]\ndatabase = "{url}"\nnamespace = "shop"\n'
        f'[destinations.runner]\nsink = "{dead}"\nallow = ["127.0.0.0/8"]\n'
        '[[routes]]\nevents = ["*"]\nto = ["runner"]\n',
    )
    shop = shop_for(url, Destination("runner", dead))
    with project.running("relay", "--listen", "127.0.0.1:0"):
        page = Page(project)
        project.until(lambda: page.ready()["ready"])
        shop.emit(1)
        project.until(lambda: not page.ready()["ready"])
        [problem] = page.ready()["problems"]
        assert problem["destination"] == "runner"
        assert "circuit" in problem["reason"]
        project.until(lambda: page.value("shop_outbox_circuit_open", destination="runner") == 1)
        assert page.value("shop_outbox_publish_errors_total", error_type="ConnectionError") >= 1
        assert page.get("/livez")[0] == 200


@pytest.mark.full
def test_a_database_that_is_gone_shows_and_holds_up_no_scrape(shop: Shop, project: Project) -> None:
    name = shop.engine.url.database
    server = shop.engine.url.set(database="postgres").render_as_string(hide_password=False)
    with project.running("relay", "--listen", "0"):
        page = Page(project)
        project.until(lambda: page.ready()["ready"])
        project.until(lambda: page.value("outbox_pending_messages", destination="on_order") == 0)
        last = page.value("outbox_scrape_last_success_timestamp")
        with psycopg.connect(server.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )
            project.until(lambda: (page.value("outbox_scrape_errors_total") or 0) >= 1)
            project.until(lambda: not page.ready()["ready"])
            assert page.value("outbox_scrape_last_success_timestamp") >= last
            assert page.value("outbox_pending_messages", destination="on_order") == 0
            assert page.get("/livez")[0] == 200
            connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            project.until(lambda: page.ready()["ready"])


def test_the_canary_proves_the_path(shop: Shop, project: Project) -> None:
    text = project.read("relaybox.toml")
    project.write("relaybox.toml", f'{text}canary = "1s"\ncanary_destination = "on_order"\n')
    project.write("shop.py", APP.replace('payload["n"]', 'payload.get("n")'))
    with project.running("relay", "--listen", "0"):
        page = Page(project)
        project.until(lambda: page.value("outbox_canary_seconds", destination="on_order") is not None)
        first = page.value("outbox_canary_last_success_timestamp", destination="on_order")
        assert first == pytest.approx(time.time(), abs=PATIENCE)
        project.until(lambda: page.value("outbox_canary_last_success_timestamp") != first)
        assert page.ready()["ready"]
    assert shop.states("on_order")["delivered"] >= 2
