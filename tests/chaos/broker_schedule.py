"""One schedule with a broker: harm is done to it while events flow there and to a healthy receiver beside it.

Emitters come in waves, one for each harm, so that there is something to deliver however long a broker takes
to be started again. The judge knows exactly what the broker acknowledged (see ``brokers.base``), which
attempts were under way during a harm (see ``flights``), and when events reached the receiver beside it.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec
import sqlalchemy as sa

from relaybox.operate.admin import Admin
from relaybox.relay.crashpoint import CRASH_POINTS
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.testing.checker import Received
from tests.chaos import receiver, workload
from tests.chaos.brokers.base import Broker, Harm
from tests.chaos.cluster import Ground
from tests.chaos.drivers import DRIVERS, engine
from tests.chaos.faults import CALM, Draw, Fault
from tests.chaos.fleet import Doom
from tests.chaos.schedule import Result, Schedule, Verdict, judge, payload_of
from tests.chaos.storm import Scene, Storm
from tests.chaos.workload import BROKER, Place, Rows

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
    """The time, by the machine's clock, in which a broker had a fault."""

    begun: float
    ended: float
    shut: tuple[float, float] | None = None  # While nothing could get there


def install(rows: Rows) -> None:
    for statement in WITNESS:
        rows.execute(statement)


def flights(rows: Rows) -> list[Flight]:
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
    """Return how often each delivery may have arrived again.

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


FIRST = 1.0  # Seconds in which the first events are emitted, before anything happens


class Blow(NamedTuple):
    """One harm: when it comes after the end of the one before, and how long it lasts, in seconds."""

    kind: str
    gap: float
    lasts: float
    asked: bool = True
    """True if it lasts until an answer to ``why`` names it; otherwise it may end before it is noticed."""


class BrokerDraw(NamedTuple):
    general: Draw
    blows: tuple[Blow, ...]


def draw(seed: int, kinds: Sequence[str], *, every: bool = False) -> BrokerDraw:
    """Return what this seed does to a broker; with ``every``, all kinds of trouble and none for a relay."""
    random = Random(seed)
    calm = random.random() < CALM and not every
    chosen = random.sample(kinds, len(kinds) if every else random.randint(1, min(3, len(kinds))))
    blows = () if calm else tuple(_blow(random, kind, every) for kind in chosen)
    hit = not (calm or every)
    return BrokerDraw(
        Draw(
            seed,
            relays=random.randint(2, 3),
            seconds=FIRST,
            faults=_faults(random, blows) if hit else (),
            dooms=_dooms(random) if hit else (),
            batch=random.choice((5, 20, 20, 100)),
            concurrency=random.choice((4, 50, 50)),
        ),
        blows,
    )


def _blow(random: Random, kind: str, every: bool) -> Blow:
    asked = random.random() < 0.7 or every
    lasts = random.uniform(0.3, 0.6 if every else 1.5) if asked else random.uniform(0.0, 0.4)
    return Blow(kind, random.uniform(0.1, 0.6), lasts, asked)


def _faults(random: Random, blows: Sequence[Blow]) -> tuple[Fault, ...]:
    """Relays are killed and leave, but none stands still: what it had under way has no end that is known."""
    if random.random() < 0.5:
        return ()
    seconds = FIRST + sum(blow.gap + blow.lasts for blow in blows)
    kinds = random.choices(("kill relay", "kill relay", "relay leaves"), k=random.randint(1, 3))
    return tuple(
        sorted(
            (Fault(kind, random.uniform(0.2, 1.0) * seconds) for kind in kinds), key=lambda fault: fault.at
        )
    )


def _dooms(random: Random) -> tuple[Doom, ...]:
    if random.random() < 0.6:
        return ()
    count = random.randint(1, 2)
    points = random.choices(CRASH_POINTS, k=count)
    return tuple(Doom(point, random.choice((1, 2, 5)), signal.SIGKILL) for point in points)


T = TypeVar("T")
SEVERAL = 5


class Operator:
    """An operator with the command line, who does not know which faults the broker had."""

    def __init__(self, place: Place) -> None:
        self._url = place.url
        self._outbox = place.outbox()

    def waiting(self) -> list[UUID]:
        """Return the first rows for the broker that have not arrived there yet."""
        event = self._outbox.tables.event.c
        query = sa.select(event.id).where(
            event.destination == BROKER, event.status.in_(("pending", "failed"))
        )
        return [row.id for row in self._rows(query.order_by(event.position).limit(SEVERAL))]

    def why(self, rows: list[UUID]) -> list[str]:
        async def ask(admin: Admin) -> list[str]:
            return [reason.text for id_ in rows for reason in await admin.why(id_)]

        return self._do(ask)

    def retry(self, said: str) -> int:
        """Retry what failed for the broker with an error like this; return how many that was."""
        event = self._outbox.tables.event.c
        query = sa.select(event.id, event.error_message)
        failed = [
            row.id
            for row in self._rows(query.where(event.destination == BROKER, event.status == "failed"))
            if re.search(said, row.error_message or "")
        ]

        async def act(admin: Admin) -> None:
            await admin.retry(failed)

        if failed:
            self._do(act)
        return len(failed)

    def _do(self, work: Callable[[Admin], Awaitable[T]]) -> T:
        async def doing() -> T:
            store = open_store(self._url, self._outbox.tables)
            try:
                return await work(Admin(SqlLedger(store), self._outbox.settings.destinations, "operator"))
            finally:
                await store.close()

        return asyncio.run(doing())

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with engine(self._url).connect() as connection:
            return list(connection.execute(query).all())


WAVE = 2  # Emitters for each harm: one before it begins, and one while it lasts
STILL = 8.0  # Seconds for which a receiver that is well may get nothing though events wait for it
LATE = 30.0  # Seconds in which an event reaches it, also where the machine is busy with something else
ASKING = 15.0  # Seconds after which ``why`` is answered, even on a busy machine
LEASES = 2
"""Where relays are killed it may take so many more."""
CREATED = "SELECT event_id, destination, extract(epoch FROM created_at)::float8 FROM outbox_event"


class BrokerSchedule(Schedule):
    def __init__(
        self, ground: Ground, broker: Broker, url: str, plan: BrokerDraw, events: int, defect: str
    ) -> None:
        part = -(-events // (len(plan.blows) + 1))
        super().__init__(ground, url, plan.general, part, defect)
        self._broker = broker
        self._blows = plan.blows
        self._part = part
        self._lease = 3.0 + broker.timeout
        self._windows: list[Window] = []
        self._refusals: list[Harm] = []
        self._happened: Counter[str] = Counter()
        self._explained = 0
        self._slowest = 0.0
        self._bound = 0
        broker.make()

    @property
    def subject(self) -> str:
        return self._broker.name

    def run(self) -> Result:
        result = super().run()
        return msgspec.structs.replace(
            result,
            bound=self._bound,
            faults={**result.faults, **self._happened},
            findings={"late": 0, "unexplained": 0, **result.findings},
            explained=self._explained,
            delay=round(self._slowest, 2),
        )

    def _place(self, remote: receiver.Remote) -> Place:
        return msgspec.structs.replace(
            super()._place(remote), broker=self._broker.url, lease=self._lease, timeout=self._broker.timeout
        )

    def _set_up(self) -> Scene:
        scene = super()._set_up()
        self._way = self._place(scene.receiver)
        self._operator = Operator(self._way)
        return scene

    def _prepare(self, rows: Rows) -> None:
        install(rows)

    def _rage(self, scene: Scene, storm: Storm) -> None:
        for number, blow in enumerate(self._blows):
            self._emit(scene, WAVE * number, blow.gap + blow.lasts)
            _pass(storm, blow.gap)
            self._strike(scene, storm, blow, WAVE * number + 1)
        storm.rage()
        storm.heal()

    def _emit(self, scene: Scene, number: int, seconds: float) -> None:
        drivers = DRIVERS[self._url.partition(":")[0]]
        driver, seed = drivers[number % len(drivers)], 1000 * self._draw.seed + number
        scene.emitters.start(workload.Plan(self._way, driver, seed, -(-self._part // WAVE), seconds))

    def _strike(self, scene: Scene, storm: Storm, blow: Blow, number: int) -> None:
        harm = self._broker.harms[blow.kind]
        self._happened[f"broker: {blow.kind}"] += 1
        begun = time.time()
        harm.begin()
        felt = time.time()
        try:
            self._emit(scene, number, blow.lasts)
            _pass(storm, blow.lasts)
            if blow.asked and harm.says:
                self._ask(scene, storm, harm, blow)
        finally:
            shut = (felt, time.time()) if harm.shut else None
            harm.end()
        # A broker that is back is still busy with what it was sent meanwhile.
        self._windows.append(Window(begun, time.time() + self._broker.timeout, shut))
        if harm.refuses:
            self._refusals.append(harm)

    def _ask(self, scene: Scene, storm: Storm, harm: Harm, blow: Blow) -> None:
        """Why the first events wait, until the harm is named in an answer."""
        end, said = time.monotonic() + ASKING, [""]
        while time.monotonic() < end:
            self._retry()
            rows = self._operator.waiting()
            if not rows and not scene.emitters.busy:
                # None of them was too large, or all were called delivered, which is judged elsewhere.
                return
            said = self._operator.why(rows)
            if any(re.search(harm.says, text) for text in said):
                self._explained += 1
                return
            _pass(storm, 0.1)
        scene.unexpected.append(("unexplained", f"{self.subject} {blow.kind}: {' | '.join(said)}"))

    def _retry(self) -> int:
        """Retry what was too large until a while ago; return how many that was."""
        return sum(self._operator.retry(harm.says) for harm in self._refusals)

    def _is_drained(self, scene: Scene) -> bool:
        return not self._retry() and super()._is_drained(scene)

    def _judge(self, scene: Scene, applied: list[receiver.Applied]) -> Verdict:
        excused = excuses(flights(scene.rows), self._windows, scene.fleet.killed, BROKER, self._broker.copies)
        self._bound = sum(excused.values())
        arrived = [Received(BROKER, one.event_id, payload_of(one.body)) for one in self._broker.read()]
        verdict = judge(scene.rows, applied, excused, elsewhere={BROKER: arrived})
        ended = [("ended", text) for text in (*scene.fleet.unexpected, *scene.emitters.unexpected)]
        late = self._late(scene, applied)
        return verdict._replace(others=(*verdict.others, *ended, *scene.unexpected, *late))

    def _late(self, scene: Scene, applied: list[receiver.Applied]) -> list[tuple[str, str]]:
        """Return what reached the healthy receiver later than it should."""
        created = {(str(event), place): at for event, place, at in scene.rows.execute(CREATED)}
        offset = time.time() - time.monotonic()
        arrivals = [(one.headers["webhook-id"], one.endpoint, one.at + offset) for one in applied]
        more = LEASES * self._lease if scene.fleet.killed else 0.0
        found = list(waits(created, arrivals))
        self._slowest = max((wait.still for wait in found), default=0.0)
        return [
            ("late", f"{wait.event} waited for {wait.all:.1f} s, for {wait.still:.1f} s while nothing came")
            for wait in found
            if wait.still > STILL + more or wait.all > LATE + more
        ]


class Wait(NamedTuple):
    """For how many seconds an event was on its way, and how many of them nothing else arrived either."""

    event: tuple[str, str]
    all: float
    still: float


def waits(
    created: Mapping[tuple[str, str], float], arrivals: Iterable[tuple[str, str, float]]
) -> Iterator[Wait]:
    """Yield how long every event that arrived waited until its first arrival."""
    last: dict[str, float] = {}
    seen: set[tuple[str, str]] = set()
    for event_id, place, at in arrivals:
        event = event_id, place
        if event in created and event not in seen:
            seen.add(event)
            begun = created[event]
            yield Wait(event, at - begun, at - max(begun, last.get(place, begun)))
        last[place] = at


def _pass(storm: Storm, seconds: float) -> None:
    end = time.monotonic() + seconds
    storm.step()
    while time.monotonic() < end:
        storm.step()


def run_broker_schedule(
    ground: Ground,
    broker: Broker,
    seed: int,
    events: int = 1000,
    *,
    plan: BrokerDraw | None = None,
    defect: str = "",
) -> Result:
    """Run the schedule that this seed draws (or ``plan``) with the broker and a fresh PostgreSQL database.

    ``defect``: of every relay, as ``tests.chaos.broken`` has them.
    """
    with ground.server.database() as url:
        drawn = plan or draw(seed, tuple(broker.harms))
        return BrokerSchedule(ground, broker, url, drawn, events, defect).run()
