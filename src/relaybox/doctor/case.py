"""What is examined: settings, a database, and the questions that are put to it."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from relaybox.admin import Admin
from relaybox.config import Settings
from relaybox.doctor.finding import Finding, Unseen
from relaybox.migrations import Outbox
from relaybox.parts import Handlers
from relaybox.program import Program
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query
from relaybox.stores.steps import Row, Steps

STATEMENT_SECONDS = 5
"""The longest that the server works on one question."""

Results: TypeAlias = AsyncIterator[Finding | Unseen]

_BOUNDS = f"""
SELECT set_config('statement_timeout', '{STATEMENT_SECONDS}s', true),
       set_config('transaction_read_only', 'on', true)"""


@dataclass(frozen=True, slots=True)
class Case:
    """Settings, without the database that they name."""

    settings: Settings
    handlers: Handlers
    clock: Callable[[], float]
    """The time of this host, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Patient(Case):
    """Settings, and the database that they name; ``version`` is its tables', 0 where there are none."""

    store: SqlStore
    admin: Admin
    outbox: Outbox
    version: int

    async def ask(self, sql: str, **params: Any) -> list[Row]:
        """The rows of one question, in the words of the store's statements; nothing can be changed by it."""
        return await ask(self.store, sql, **params)


async def ask(store: SqlStore, sql: str, **params: Any) -> list[Row]:
    """The rows of one question, which the server gives up after a while, where it can."""
    statements = store.steps.statements
    match statements.dialect.name:
        case "postgresql":
            before: Sequence[Query] = [Query(_BOUNDS, ())]
        case "mariadb" if sql.lstrip().startswith("SELECT"):
            before, sql = [], f"SET STATEMENT max_statement_time = {STATEMENT_SECONDS} FOR {sql.strip()}"
        case _:
            before = []
    query = statements.others({"question": sql})("question", **params)

    def steps() -> Steps[list[Row]]:
        results = yield [*before, query]
        return results[-1]

    return await store.driver.run(steps)


def typed(*words: str) -> str:
    """A command of ours as it is to be typed."""
    return f"{Program.name} {' '.join(map(shlex.quote, words))}"


def several(number: int, noun: str) -> str:
    """``1 event``, ``2 events``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
