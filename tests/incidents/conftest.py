"""What the incidents have in common. Each runs on the product and on variants that are broken on purpose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox import Destination
from relaybox.errors import RelayboxError
from tests.integration.shop import Databases, Shop, shop_for
from tests.locks import waiters
from tests.waiting import PATIENCE, await_for

BOTH_WAYS = ["postgresql-18", "sqlite"]
"""Where a claim is one statement, and where it is several; MariaDB has the texts of the latter."""
PRODUCT = "the product"
IN_VAIN = 1.5
"""Seconds to wait for what a broken variant will not do."""


def variants(*broken: str) -> pytest.MarkDecorator:
    """Run the test on the product, ``broken=None``, and on what is broken in each of these ways."""
    return pytest.mark.parametrize("broken", [None, *broken], ids=[PRODUCT, *broken])


@dataclass(frozen=True, slots=True)
class Case:
    """The product, or how it is broken; one check judges both."""

    broken: str | None
    database: Databases
    patch: pytest.MonkeyPatch

    @property
    def seconds(self) -> float:
        """Return how long to wait for what only the product does."""
        return IN_VAIN if self.broken else PATIENCE

    @contextmanager
    def check(self, finding: str) -> Iterator[None]:
        """Require that the product passes the block, and that a broken variant fails it with this finding."""
        if self.broken is None:
            yield
            return
        with pytest.raises((AssertionError, RelayboxError), match=re.escape(finding)):
            yield

    def rewrite(self, texts: Any, name: str, *changes: tuple[str, str]) -> None:
        """Change the text of a statement, or of a word that statements have in common."""
        assert isinstance(texts, MutableMapping)
        text = texts[name]
        for old, new in changes:
            assert old in text, f"{name} no longer says {old!r}"
            text = text.replace(old, new)
        self.patch.setitem(texts, name, text)


@pytest.fixture
def case(broken: str | None, migrated_database: Databases, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(broken, migrated_database, monkeypatch)


def make_shop(url: str, **options: Any) -> Shop:
    """Return a shop with one destination, ``shop``."""
    return shop_for(url, Destination("shop", "console:", **options))


async def done_or_waiting(task: asyncio.Task[Any], shop: Shop) -> None:
    """Until the task is done, or some transaction of the database waits for a lock."""
    await await_for(lambda: task.done() or waiters(shop.engine))


def take_over(shop: Shop, owner: str) -> None:
    """Have another relay claim all that is leased, as if it had run out."""
    event = shop.outbox.tables.event
    taken = event.c.lease_token.is_not(None)
    with shop.engine.begin() as connection:
        connection.execute(sa.update(event).where(taken).values(lease_token=uuid4(), lease_owner=owner))
