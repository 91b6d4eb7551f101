"""``emit`` itself: check the connection, build the rows, write them inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from relaybox.config import Settings
from relaybox.emit.drive import adrive, drive
from relaybox.emit.driver import Channel, Driver
from relaybox.emit.find import async_channel, async_sqlalchemy, channel
from relaybox.emit.row import Call, Emission, EmitOptions, RowBuilder
from relaybox.emit.transaction import Transaction
from relaybox.emit.write import Writing, committed, write
from relaybox.errors import InvalidField
from relaybox.event import Emitted
from relaybox.schema import Tables
from relaybox.stores.statements import Statements

Calls: TypeAlias = Iterable[Call | Mapping[str, Any]]


class Emitter:
    """Emits by one outbox's settings into one outbox's tables."""

    def __init__(self, settings: Settings, tables: Tables) -> None:
        self._tables = tables
        self._insert = tables.event.insert()
        self._builder = RowBuilder(settings)
        self._statements: dict[Driver, Statements] = {}

    def emit(
        self,
        connection: Any,
        aggregate_type: str,
        aggregate_id: Any,
        event_type: str,
        payload: Any,
        *,
        autocommit: bool = False,
        **options: Unpack[EmitOptions],
    ) -> Emitted:
        """Write one event on a synchronous connection or session."""
        call = Call(aggregate_type, aggregate_id, event_type, payload, **options)
        return self.write(connection, [call], autocommit)[0]

    async def aemit(
        self,
        connection: Any,
        aggregate_type: str,
        aggregate_id: Any,
        event_type: str,
        payload: Any,
        *,
        autocommit: bool = False,
        **options: Unpack[EmitOptions],
    ) -> Emitted:
        """Write one event on an asynchronous connection or session."""
        call = Call(aggregate_type, aggregate_id, event_type, payload, **options)
        return (await self.awrite(connection, [call], autocommit))[0]

    def emit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events on a synchronous connection or session, in the order given."""
        return self.write(connection, _as_calls(calls), autocommit)

    async def aemit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events on an asynchronous connection or session, in the order given."""
        return await self.awrite(connection, _as_calls(calls), autocommit)

    def transaction(self, connection: Any) -> Transaction:
        """A block that is a transaction, or a savepoint where one is open already."""
        return Transaction(connection)

    def write(self, connection: Any, calls: Sequence[Call], autocommit: bool) -> list[Emitted]:
        """Write the calls' events through whatever serves the connection."""
        way = channel(connection, self._insert)
        return drive(self._writing(way, calls, autocommit), way.execute)

    async def awrite(self, connection: Any, calls: Sequence[Call], autocommit: bool) -> list[Emitted]:
        """``write``, for asynchronous connections and sessions."""
        if (asynchronous := async_sqlalchemy(connection)) is not None:
            written: list[Emitted] = await asynchronous.run_sync(self.write, calls, autocommit)
            return written
        way = async_channel(connection)
        return await adrive(self._writing(way, calls, autocommit), way.execute)

    def _writing(self, way: Channel, calls: Sequence[Call], autocommit: bool) -> Writing[list[Emitted]]:
        """The statements to execute; whatever is refused is refused before the first of them."""
        alone = way.check(autocommit)
        driver = way.driver
        dialect = driver.dialect
        statements = self._statements.get(driver) or self._make_statements(driver)
        emissions = [self._builder.build(call, dialect) for call in calls]
        writing = write(emissions, statements, dialect)
        return committed(writing) if alone and _are_several(emissions) else writing

    def _make_statements(self, driver: Driver) -> Statements:
        made = Statements(self._tables, driver.dialect, driver.style)
        return self._statements.setdefault(driver, made)


def _are_several(emissions: Sequence[Emission]) -> bool:
    """Whether they may take more than one statement."""
    return len(emissions) > 1 or any(e.idempotency_key is not None or len(e.rows) > 1 for e in emissions)


def _as_calls(calls: Calls) -> list[Call]:
    return [call if isinstance(call, Call) else _as_call(call) for call in calls]


def _as_call(call: Any) -> Call:
    if not isinstance(call, Mapping):
        raise InvalidField("calls", call, "give Call objects, or mappings of emit's arguments")
    try:
        return Call(**call)
    except TypeError as error:
        raise InvalidField("calls", call, str(error)) from None
