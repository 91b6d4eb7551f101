"""Emit: find the connection's driver, build the rows, write them in the caller's transaction, wake relays."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from relaybox.core.event import Emitted
from relaybox.core.rollout import RouteFile
from relaybox.core.settings import Route, Settings
from relaybox.database.drivers.driver import Channel, Driver
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Statements
from relaybox.emit.committed import AfterCommit
from relaybox.emit.row import Call, RowBuilder
from relaybox.emit.transaction import Transaction
from relaybox.emit.wakes.local import Caller
from relaybox.emit.write import write
from relaybox.errors import UnsupportedConnection

# Dialects with another name than the backend in a URL.
_FAMILIES = {"mariadb": "mysql"}


class LiveSettings:
    """The settings of an outbox, whose routes may change at run time, and the builder made from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.builder = RowBuilder(settings)
        self._changing = threading.Lock()
        self._file: RouteFile | None = None

    def change(self, change: Callable[[Settings], Settings]) -> None:
        """Use the changed settings from now on."""
        with self._changing:
            self.settings = change(self.settings)
            self.builder = RowBuilder(self.settings)

    def follow(self, file: Path, first: int) -> None:
        """Apply later changes of ``rollout`` and ``shadow`` in this file to its routes, from ``first`` on."""

        def take(new: Mapping[int, Route]) -> None:
            self.change(lambda settings: _with_routes(settings, first, new))

        self._file = RouteFile(file, self.settings.routes[first:], take)

    def look(self) -> None:
        """Reload the followed file if it is time and it changed."""
        if self._file is not None:
            self._file.look()

    def routes(self) -> Sequence[Route]:
        """Return the current routes."""
        self.look()
        return self.settings.routes


def _with_routes(settings: Settings, first: int, new: Mapping[int, Route]) -> Settings:
    """Copy the rollout and shadow of ``new`` to the settings' routes, counted from ``first``."""
    routes = list(settings.routes)
    for number, route in new.items():
        before = routes[first + number]
        routes[first + number] = dataclasses.replace(before, rollout=route.rollout, shadow=route.shadow)
    return dataclasses.replace(settings, routes=routes)


class Emitter:
    """Writes the events of one outbox; after their commit it calls ``caller``."""

    def __init__(self, live: LiveSettings, tables: Tables, caller: Caller | None = None) -> None:
        self._live = live
        self._family = sa.make_url(live.settings.database).get_backend_name()
        self._tables = tables
        self._insert = tables.event.insert()
        self._statements: dict[Driver, Statements] = {}
        self.after_commit = AfterCommit(caller)

    def transaction(self, connection: Any) -> Transaction:
        """Return a block that is a transaction, or a savepoint in an open one."""
        return Transaction(connection, self._insert, self.after_commit)

    def write(
        self, connection: Any, calls: Sequence[Call], autocommit: bool, many: bool = False
    ) -> list[Emitted]:
        """Write the events of the calls; with ``many``, an error names its call.

        All errors of the calls are raised before the first statement.
        """
        way = channel(connection, self._insert)
        statements, alone = self._check(way, autocommit)
        builder = self._live.builder
        emissions = builder.build_all(calls, statements.dialect, many)
        emitted = way.run(write(emissions, statements, alone))
        self.after_commit.call(emitted, way, alone, builder.handed_over)
        return emitted

    async def awrite(
        self, connection: Any, calls: Sequence[Call], autocommit: bool, many: bool = False
    ) -> list[Emitted]:
        """Like ``write``, for asynchronous connections and sessions."""
        if (asynchronous := async_sqlalchemy(connection)) is not None:
            written: list[Emitted] = await asynchronous.run_sync(self.write, calls, autocommit, many)
            return written
        way = async_channel(connection)
        statements, alone = self._check(way, autocommit)
        builder = self._live.builder
        emissions = builder.build_all(calls, statements.dialect, many)
        emitted = await way.arun(write(emissions, statements, alone))
        self.after_commit.call(emitted, way, alone, builder.handed_over)
        return emitted

    def _check(self, way: Channel, autocommit: bool) -> tuple[Statements, bool]:
        """Return the statements for the connection, and True if what they write commits on its own."""
        statements = self._statements.get(way.driver) or self._make_statements(way.driver)
        alone = way.check(autocommit)
        self._live.look()
        return statements, alone

    def _make_statements(self, driver: Driver) -> Statements:
        """Make the statements once for each driver; raise if the driver is for another database."""
        family = _FAMILIES.get(driver.dialect.name, driver.dialect.name)
        if family != self._family:
            problem = f"this outbox is on {self._family}, the connection is {driver.name}"
            raise UnsupportedConnection(f"{problem}; pass a connection to the outbox's own database")
        made = Statements(self._tables, driver.dialect, driver.style)
        return self._statements.setdefault(driver, made)
