"""What relays share of a destination beside its rows: the pause, the circuit, and the line of its rate limit.

Each change is a compare-and-set: one UPDATE that names the state it leaves, so that of several relays one
makes it. ``rate_at`` is the time of the next free place in the line.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from relaybox.core.outcome import wait
from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.destination import texts
from relaybox.database.steps import Steps
from relaybox.stores.sql.steps import storable


class DestinationSteps:
    """Changes to a destination's row, which is made where it is missing."""

    def __init__(self, statements: Statements) -> None:
        self._dialect = statements.dialect
        self._ensure = partial(statements, "ensure_destination")
        self._lock = partial(statements, "lock_destination")
        self._sql = statements.others(texts(self._dialect.name))

    def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> Steps[bool]:
        """From closed, or half-open where ``probed``, to open."""
        values = {"seconds": wait(seconds), "reason": storable(reason)}
        state = "half_open" if probed else "closed"
        return (yield from self._change("open", destination, make=True, state=state, **values))

    def probe(self, destination: str, seconds: float) -> Steps[bool]:
        """From open or half-open, when its time is over, to half-open."""
        return (yield from self._change("probe", destination, seconds=wait(seconds)))

    def close_circuit(self, destination: str) -> Steps[bool]:
        """From half-open to closed."""
        return (yield from self._change("close", destination))

    def pause(self, destination: str, by: str, reason: str) -> Steps[bool]:
        """From not paused to paused without an end."""
        return (yield from self._change("pause", destination, make=True, by=by, reason=storable(reason)))

    def reserve(self, destination: str, seconds: float) -> Steps[float]:
        """Take ``seconds`` of the line; how long it is until they begin."""
        if self._dialect.one_statement:
            [[[left]]] = yield [self._sql("reserve", destination=destination, seconds=seconds)]
            return max(0.0, float(left) - seconds)
        return (yield from self._reserve_stepwise(destination, timedelta(seconds=seconds)))

    def _reserve_stepwise(self, destination: str, length: timedelta) -> Steps[float]:
        # The lock is a statement of its own: MySQL's clock stands still while a statement waits.
        read = self._sql("read_line", destination=destination)
        _, rows = yield [self._lock(destination=destination), read]
        if not rows:
            _, rows = yield [self._ensure(destination=destination), read]
        # SQLite's own arithmetic is of milliseconds; a line may be finer.
        free, now = (value and self._dialect.from_time(value) for value in rows[0])
        start = max(free or now, now)
        yield [self._sql("move_line", destination=destination, at=self._dialect.to_time(start + length))]
        return float((start - now).total_seconds())

    def _change(self, name: str, destination: str, *, make: bool = False, **values: Any) -> Steps[bool]:
        queries = [self._ensure(destination=destination)] if make else []
        queries.append(self._sql(name, destination=destination, **values))
        if not self._dialect.returning:
            queries.append(self._sql("changed"))
        results = yield queries
        return bool(results[-1] and results[-1][0][0])
