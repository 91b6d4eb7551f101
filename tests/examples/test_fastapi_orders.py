"""The shop, started by its one command: by itself through kills and an outage, and by a person."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from playwright.sync_api import Locator, Page, expect

from tests.examples.running import (
    PATIENCE,
    browsing,
    check,
    checked,
    found,
    interrupted,
    killed,
    picture,
    running,
    said,
    shows,
    tell,
)

EXAMPLE = "fastapi_orders"
SUMMARY = re.compile(r"(\d+) orders, (\d+) events, (\d+) messages in Kafka, (\d+) shipments\.")

# Where no Kafka can be had, there is nothing to run.
pytestmark = pytest.mark.usefixtures("kafka_url")


def test_every_paid_order_is_shipped_once_through_kills_and_an_outage(directory: Path) -> None:
    printed = checked(EXAMPLE, directory, steps=8)
    [(orders, events, messages, shipments)] = [map(int, one) for one in SUMMARY.findall(printed)]
    assert (orders, events, shipments) == (51, 102, 51)
    assert messages > events


def test_a_person_sees_where_each_order_is_and_a_kill_ends_everything(
    chromium_path: str, directory: Path
) -> None:
    with running(EXAMPLE, directory) as (process, output):
        url = found(r"The shop: (\S+)", said(output, "Ctrl-C ends everything."))
        with browsing(chromium_path) as page:
            page.goto(url)
            buy(page, "green tea")
            shows(row(page, "green tea"), "order.paid delivered 1")
            tell(process, "kafka")
            said(output, "kafka is dead.")
            buy(page, "black tea")
            shows(row(page, "black tea"), "Connection refused")
            shows(row(page, "black tea"), "order.paid waiting none yet")
            picture(page, "fastapi-orders.png")
            tell(process, "kafka")
            said(output, "kafka runs.")
            shows(row(page, "black tea"), "order.paid delivered 1")
            expect(page.get_by_text("Kafka cannot be reached")).to_be_hidden(timeout=PATIENCE)
        # PostgreSQL, Kafka, the shop, the relay and the consumer.
        killed(process, others=5)


def test_ctrl_c_ends_everything_and_leaves_nothing(directory: Path) -> None:
    with running(EXAMPLE, directory) as (process, output):
        said(output, "PostgreSQL and Kafka run")
        interrupted(process, directory)


def test_a_topic_that_is_there_already_is_left_alone(kafka_url: str, directory: Path) -> None:
    address = kafka_url.removeprefix("kafka://")
    admin = AdminClient({"bootstrap.servers": address})
    with suppress(KafkaException):
        admin.create_topics([NewTopic("order-events", 1)])["order-events"].result()
    done = check(EXAMPLE, directory, "--kafka", address)
    assert done.returncode == 1
    assert "Topic 'order-events' already exists" in done.stderr
    assert list(directory.iterdir()) == []
    assert "order-events" in admin.list_topics(timeout=10).topics


def buy(page: Page, item: str) -> None:
    page.get_by_label("Item").fill(item)
    page.get_by_role("button", name="Order").click()
    row(page, item).get_by_role("button", name="Pay").click()


def row(page: Page, item: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("cell", name=item))
