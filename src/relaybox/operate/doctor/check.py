"""A check, the context it sees (settings, database), and the findings it yields."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from relaybox.core.commands import Program
from relaybox.core.settings import Settings
from relaybox.database.migrations import Outbox
from relaybox.database.statements import server
from relaybox.database.statements.delivery import Query, Texts
from relaybox.database.steps import Row, ask
from relaybox.operate.admin import Admin
from relaybox.sinks.open import Handlers
from relaybox.stores.sql.store import SqlStore

Level: TypeAlias = Literal["error", "warning", "info"]
"""``error``: events are not delivered, or will not be.

``warning``: they are, but not as well as they could be. ``info``: worth knowing, and perhaps intended.
"""

LEVELS: tuple[Level, ...] = ("error", "warning", "info")

SERVERS = ("postgresql", "mariadb", "mysql")
EVERY_DATABASE = (*SERVERS, "sqlite")

Need: TypeAlias = Literal["settings", "database", "tables"]
"""The least that a check needs: a ``Context``, a ``DatabaseContext``, or one with tables."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: what was seen, and the command, SQL or advice that fixes it."""

    level: Level
    title: str
    detail: str
    fix: str
    check: str = ""


@dataclass(frozen=True, slots=True)
class Unseen:
    """What a check could not look at, and why."""

    reason: str
    check: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the checks found, the worst first."""

    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]
    checks: tuple[str, ...]

    @property
    def sick(self) -> bool:
        """True if a finding is an error."""
        return any(finding.level == "error" for finding in self.findings)


Results: TypeAlias = AsyncIterator[Finding | Unseen]


@dataclass(frozen=True, slots=True)
class Context:
    """The settings, for a check that needs no database."""

    settings: Settings
    handlers: Handlers
    clock: Callable[[], float]
    """Returns this host's time, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class DatabaseContext(Context):
    """The settings and an open database; ``version`` is that of its tables, 0 if there are none."""

    store: SqlStore
    admin: Admin
    outbox: Outbox
    version: int = 0

    async def ask(self, sql: str, **params: Any) -> list[Row]:
        """Return the rows of one read-only query, written like the store's and time-limited if possible."""
        if self.outbox.dialect == "mariadb":
            sql = server.bounded_on_mariadb(sql)
        queries = [self.store.steps.statements.others(Texts({"question": sql}))("question", **params)]
        if self.outbox.dialect == "postgresql":
            queries.insert(0, Query(server.BOUNDS, ()))
        return (await self.store.driver.run(partial(ask, queries)))[-1]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to check; ``run`` yields what is wrong, on the databases that ``on`` names."""

    name: str
    run: Callable[[Any], Results]
    needs: Need = "tables"
    on: Collection[str] = EVERY_DATABASE


def check(
    *, needs: Need = "tables", on: Collection[str] = EVERY_DATABASE
) -> Callable[[Callable[[Any], Results]], Check]:
    """Turn a function into a check with the function's name."""
    return lambda run: Check(run.__name__, run, needs, on)


def typed(*words: str) -> str:
    """Return one of our commands as a user types it."""
    return f"{Program.name} {' '.join(map(shlex.quote, words))}"


def split_fix(text: str) -> tuple[str, str]:
    """Return an error's text in one line, and the fix after its last semicolon."""
    seen, _, fix = " ".join(text.split()).rpartition("; ")
    return (seen, fix) if seen else (fix, "")
