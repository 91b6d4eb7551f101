"""When each delivery was under way, written down by PostgreSQL itself: from its claim to its settle.

By that every duplicate is judged on its own: an event may arrive once for an attempt that succeeded, and once
more only for an attempt that something befell while it was under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from tests.chaos.workload import Rows

WITNESS = (
    """CREATE TABLE chaos_flight (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz, id uuid, event_id uuid,
    destination varchar(100), owner varchar(200), claimed boolean, status varchar(20))""",
    """CREATE FUNCTION chaos_flight() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF new.lease_token IS DISTINCT FROM old.lease_token THEN
        INSERT INTO chaos_flight (at, id, event_id, destination, owner, claimed, status)
        VALUES (clock_timestamp(), new.id, new.event_id, new.destination, new.lease_owner,
            new.lease_token IS NOT NULL, new.status);
    END IF;
    RETURN NULL; END $$""",
    """CREATE TRIGGER chaos_flight AFTER UPDATE ON outbox_event
    FOR EACH ROW EXECUTE FUNCTION chaos_flight()""",
)
HISTORY = (
    "SELECT extract(epoch FROM at)::float8, id, event_id, destination, owner, claimed, status"
    " FROM chaos_flight ORDER BY seq"
)


class Flight(NamedTuple):
    """One claim of a row, by the machine's clock. ``lost``: it was claimed again before it was settled."""

    destination: str
    event_id: UUID
    owner: str
    begun: float
    ended: float
    delivered: bool = False
    lost: bool = False


class Window(NamedTuple):
    """While something befell a broker, by the machine's clock."""

    begun: float
    ended: float
    shut: tuple[float, float] | None = None
    """While nothing could get there."""


def install(rows: Rows) -> None:
    for statement in WITNESS:
        rows.execute(statement)


def flights(rows: Rows) -> list[Flight]:
    """All of them that ended."""
    found: list[Flight] = []
    under_way: dict[UUID, Flight] = {}
    for at, id_, event_id, destination, owner, claimed, status in rows.execute(HISTORY):
        flight = under_way.pop(id_, None)
        if flight is not None:
            found.append(flight._replace(ended=at, lost=claimed, delivered=status == "delivered"))
        if claimed:
            under_way[id_] = Flight(destination, event_id, owner, at, at)
    return found


def excuses(
    flights: Iterable[Flight], windows: Sequence[Window], killed: Collection[int], broker: str, copies: int
) -> dict[tuple[str, UUID], int]:
    """How often each delivery may have arrived beyond the first time.

    A flight to the ``broker`` is harmed by what befell it meanwhile; any flight by the death of its relay.
    """
    arrivals: dict[tuple[str, UUID], int] = defaultdict(int)
    for flight in flights:
        of_broker = flight.destination == broker
        harmed = (of_broker and _overlaps(flight, windows)) or (flight.lost and _is_of(flight.owner, killed))
        in_vain = of_broker and _found_nobody(flight, windows)
        most = (copies if of_broker else 1) if harmed and not in_vain else int(flight.delivered)
        arrivals[flight.destination, flight.event_id] += most
    return {delivery: most - 1 for delivery, most in arrivals.items() if most > 1}


def _overlaps(flight: Flight, windows: Sequence[Window]) -> bool:
    return any(flight.begun <= window.ended and window.begun <= flight.ended for window in windows)


def _found_nobody(flight: Flight, windows: Sequence[Window]) -> bool:
    shut = [window.shut for window in windows if window.shut]
    return any(since <= flight.begun and flight.ended <= until for since, until in shut)


def _is_of(owner: str, processes: Collection[int]) -> bool:
    return any(f":{process}:" in owner for process in processes)
