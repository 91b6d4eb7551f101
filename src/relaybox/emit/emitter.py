"""Emit: check the connection, build the rows, and write them inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from relaybox.core.event import Emitted
from relaybox.core.routing import Routes
from relaybox.core.settings import Settings
from relaybox.database.dialects import Dialect
from relaybox.database.drivers.driver import Channel, Driver
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.database.transactions import in_transaction
from relaybox.emit.committed import Blocks, write_and_wake
from relaybox.emit.row import Call, Emission, RowBuilder
from relaybox.emit.transaction import Transaction
from relaybox.emit.wakes.wake import Caller
from relaybox.emit.write import write
from relaybox.errors import EmitError, InvalidField, UnsupportedConnection, did_you_mean

Calls: TypeAlias = Iterable[Call | Mapping[str, Any]]

# Dialects with another name than the backend in a URL.
_FAMILIES = {"mariadb": "mysql"}


class Emitter:
    """Emits by an outbox's settings; ``look``, called before events are built, may ``configure``."""

    def __init__(self, settings: Settings, tables: Tables) -> None:
        self._family = sa.make_url(settings.database).get_backend_name()
        self._tables = tables
        self._insert = tables.event.insert()
        self._builder = RowBuilder(settings)
        self._statements: dict[Driver, Statements] = {}
        self._blocks = Blocks()
        self.caller: Caller | None = None
        self.look: Callable[[], None] | None = None

    @property
    def routes(self) -> Routes:
        """The current routes."""
        return self._builder.routes

    def configure(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._builder = RowBuilder(settings)

    def emit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events on a synchronous connection or session, in the order given."""
        return self.write(connection, as_calls(calls), autocommit, many=True)

    async def aemit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events on an asynchronous connection or session, in the order given."""
        return await self.awrite(connection, as_calls(calls), autocommit, many=True)

    def transaction(self, connection: Any) -> Transaction:
        """Return a block that is a transaction, or a savepoint in an open one."""
        return Transaction(connection, self._insert, self._blocks, self.caller)

    def write(
        self, connection: Any, calls: Sequence[Call], autocommit: bool, many: bool = False
    ) -> list[Emitted]:
        """Write the events of the calls; with ``many``, an error names its call."""
        way = channel(connection, self._insert)
        return way.run(self._writing(way, calls, autocommit, many))

    async def awrite(
        self, connection: Any, calls: Sequence[Call], autocommit: bool, many: bool = False
    ) -> list[Emitted]:
        """Like ``write``, for asynchronous connections and sessions."""
        if (asynchronous := async_sqlalchemy(connection)) is not None:
            written: list[Emitted] = await asynchronous.run_sync(self.write, calls, autocommit, many)
            return written
        way = async_channel(connection)
        return await way.arun(self._writing(way, calls, autocommit, many))

    def _writing(
        self, way: Channel, calls: Sequence[Call], autocommit: bool, many: bool
    ) -> Steps[list[Emitted]]:
        """Return the statements to execute; all errors of the calls are raised before the first statement."""
        driver = way.driver
        dialect = driver.dialect
        statements = self._statements.get(driver) or self._make_statements(driver)
        alone = way.check(autocommit)
        if self.look is not None:
            self.look()
        emissions = build(self._builder, calls, dialect, many)
        writing = write(emissions, statements, dialect)
        if alone and _are_several(emissions):
            # A key that is committed without its rows would make every later try a duplicate.
            writing = in_transaction(writing)
        if self.caller is None:
            return writing
        return write_and_wake(writing, way, alone, self.caller, self._blocks, self._builder.handed_over)

    def _make_statements(self, driver: Driver) -> Statements:
        """Make the statements once for each driver; raise if the driver is for another database."""
        family = _FAMILIES.get(driver.dialect.name, driver.dialect.name)
        if family != self._family:
            problem = f"this outbox is on {self._family}, the connection is {driver.name}"
            raise UnsupportedConnection(f"{problem}; pass a connection to the outbox's own database")
        made = Statements(self._tables, driver.dialect, driver.style)
        return self._statements.setdefault(driver, made)


def build(builder: RowBuilder, calls: Sequence[Call], dialect: Dialect, many: bool) -> list[Emission]:
    """Return the rows of each call; with ``many``, an error names its call."""
    emissions = []
    for number, call in enumerate(calls):
        try:
            emissions.append(builder.build(call, dialect))
        except EmitError as error:
            if many:
                error.args = (f"calls[{number}]: {error}",)
            raise
    return emissions


def _are_several(emissions: Sequence[Emission]) -> bool:
    return len(emissions) > 1 or any(
        e.idempotency_key is not None or len(e.destinations) > 1 for e in emissions
    )


def as_calls(calls: Calls) -> list[Call]:
    """Return each as a ``Call``; raise ``InvalidField``."""
    if isinstance(calls, Call | Mapping | str | bytes) or not isinstance(calls, Iterable):
        raise InvalidField("calls", calls, "give a list of Call objects")
    return [call if isinstance(call, Call) else _as_call(number, call) for number, call in enumerate(calls)]


def _as_call(number: int, call: Any) -> Call:
    place = f"calls[{number}]"
    if not isinstance(call, Mapping):
        raise InvalidField(place, call, "give Call objects, or mappings of emit's arguments")
    for name in call:
        if name not in Call.__struct_fields__:
            problem = f"emit has no argument {name!r}"
            raise InvalidField(place, call, problem + did_you_mean(str(name), Call.__struct_fields__))
    try:
        return Call(**call)
    except TypeError as error:
        raise InvalidField(place, call, str(error)) from None
