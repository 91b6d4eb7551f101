"""What the product's steps say to the fake database: the names of statements and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias
from uuid import UUID

import sqlalchemy as sa

from relaybox.schema import make_tables
from relaybox.stores import dialects
from relaybox.stores.steps import OneStatement, Stepwise, StoreSteps
from tests.simulation.database import to_datetime, to_seconds

Flavour: TypeAlias = Literal["pipeline", "steps", "single"]
"""PostgreSQL: a round trip is a transaction; MariaDB: each statement is one; SQLite: one writer at a time."""
Query: TypeAlias = tuple[str, dict[str, Any]]
Rows: TypeAlias = list[Sequence[Any]]

_TIMES = {"from_time": to_datetime, "to_time": to_seconds, "to_uuid": lambda value: value.hex}
DIALECTS = {
    "pipeline": replace(dialects.POSTGRESQL, **_TIMES, from_uuid=UUID),
    "steps": replace(dialects.MARIADB, **_TIMES, native=True),
    "single": replace(dialects.SQLITE, **_TIMES, native=True),
}
TABLES = make_tables(sa.MetaData())
LOCKS_FIRST = frozenset({"ensure_destination", "open", "probe", "close", "pause"})
"""Changes of a destination's row that on MariaDB wait for its lock before they look at it."""


class FakeStatements:
    """Stands in for ``Statements``: those of one flavour."""

    def __init__(self, flavour: Flavour, prefix: str = "") -> None:
        self.dialect = DIALECTS[flavour]
        self.tables = TABLES
        self.style = "qmark"
        self._flavour = flavour
        self._prefix = prefix

    def others(self, templates: Mapping[str, str]) -> FakeStatements:
        """Those of upkeep, or of destinations."""
        return FakeStatements(self._flavour, "upkeep " if "fence" in templates else "")

    def __call__(self, name: str, **params: Any) -> Query:
        """The named statement with these parameters."""
        first = "locked " if self._flavour == "steps" and name in LOCKS_FIRST else ""
        return first + self._prefix + name, params

    def union(self, name: str, records: Sequence[dict[str, Any]]) -> Query:
        """The named statement for each of the records."""
        return self._prefix + name, {"records": records}


def make_steps(flavour: Flavour) -> StoreSteps:
    """The product's own steps on these statements."""
    statements: Any = FakeStatements(flavour)
    claiming = OneStatement(statements) if flavour == "pipeline" else Stepwise(statements, DIALECTS[flavour])
    return StoreSteps(statements, DIALECTS[flavour], claiming)
