"""``relaybox prune``."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.integration.project import Project
from tests.integration.shop import Shop

APP = """
from relaybox import Event, Outbox

outbox = Outbox()

@outbox.handler("order.*", name="on_order", retention="1d")
def on_order(event: Event) -> None:
    pass
"""


@pytest.fixture(params=["postgresql-18", "mariadb", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, fresh_database: Callable[[str], str]) -> Shop:
    project, url = Project(tmp_path), fresh_database(request.param)
    project.write("shop.py", APP)
    project.write("relaybox.toml", f'[relaybox]\ndatabase = "{url}"\napp = "shop:outbox"\n')
    shop = Shop(url)
    shop.outbox.handler("order.*", name="on_order")(print)
    return shop


def test_what_was_kept_long_enough_is_removed(shop: Shop, tmp_path: Path) -> None:
    project, event = Project(tmp_path), shop.outbox.tables.event
    shop.emit(3)
    project.run("drain")
    assert project.run("prune") == "removed 0\n"
    with shop.engine.begin() as connection:
        oldest = sa.select(sa.func.min(event.c.position)).scalar_subquery()
        first = connection.scalar(sa.select(event.c.id).where(event.c.position == oldest))
        long_ago = sa.text("'2020-01-01 00:00:00'")
        connection.execute(event.update().where(event.c.id == first).values(delivered_at=long_ago))

    assert json.loads(project.run("prune", "--json")) == {"removed": 1}
    with shop.engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(event)) == 2
    shop.engine.dispose()


def test_the_inbox_forgets_what_is_older_than_its_window(shop: Shop, tmp_path: Path) -> None:
    project, inbox = Project(tmp_path), shop.outbox.tables.inbox
    toml = tmp_path / "relaybox.toml"
    toml.write_text(toml.read_text().replace("[relaybox]", '[relaybox]\ninbox_window = "2h"'))
    with shop.engine.begin() as connection:
        for hours in (1, 3):
            values = {"consumer": "billing", "message_id": str(hours)}
            then = datetime.now(UTC) - timedelta(hours=hours)
            connection.execute(inbox.insert().values(**values, processed_at=then))

    assert project.run("prune") == "removed 1\n"
    with shop.engine.connect() as connection:
        assert list(connection.scalars(sa.select(inbox.c.message_id))) == ["1"]
    shop.engine.dispose()


def test_while_a_relay_leads_it_is_the_relays_to_do(shop: Shop, tmp_path: Path) -> None:
    project, leader = Project(tmp_path), shop.outbox.tables.leader
    with project.running("relay"), shop.engine.connect() as connection:
        leads = sa.select(sa.func.count()).select_from(leader)
        project.until(lambda: bool(connection.scalar(leads)) or connection.rollback() is not None)
        assert project.run("prune") == "a relay leads, and sees to it\n"
    shop.engine.dispose()
