"""One schedule with a search engine: documents change while it has trouble, and the index has to be the same.

Two writers create, update and delete, each its own half of the documents, in a wave for each harm, so that
there is something to write however long an engine takes to be started again. Relays are killed meanwhile.
When all is well again and every event was delivered, the index is compared with the database.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from relaybox.search.results import Reconciled
from tests.chaos.schedule import Result
from tests.commit import ROOT
from tests.integration.archive import Archive, Relays
from tests.integration.project import COMMAND
from tests.integration.search_engines import Subject
from tests.waiting import wait_for

WRITERS = 2
PAGE = 200  # Documents that are written in one transaction at the beginning
PATIENCE = 120.0
FELT = "again in "
"""What a relay logs of a delivery that it has to repeat."""
KILLS = 4
"""Harm that is done for each relay that is killed: it needs its time to start, and one is to be sending."""


class Draw(NamedTuple):
    seed: int
    documents: int
    steps: int  # Changes of each writer, besides the first ones
    relays: int
    kinds: tuple[str, ...]
    """What befalls the engine: each of them once, in this order, and any of them while documents change."""
    policy: dict[str, Any]


def draw(seed: int, subject: Subject, events: int) -> Draw:
    """Few documents that change often or many that hardly do, and some of the engine's faults."""
    random = Random(seed)
    documents = max(WRITERS, events // random.choice((100, 10, 2)))
    possible = kinds_of(subject)
    kinds = tuple(random.sample(possible, random.randint(1, len(possible))))
    policy: dict[str, Any] = {"batch_size": random.choice((5, 100, 1000))}
    # The versions of deleted documents are not promised to outlive the server.
    if subject.guarded and "killed" not in kinds and random.random() < 0.5:
        policy["ordered"] = False
    return Draw(seed, documents, (events - documents) // WRITERS, random.randint(1, 3), kinds, policy)


def kinds_of(subject: Subject) -> list[str]:
    return list(_strikes(subject, Random()))


@contextmanager
def archive_of(database: str, directory: Path, subject: Subject, plan: Draw) -> Iterator[Archive]:
    sink = subject.sink(f"archive-{plan.seed}")
    archive = Archive(database, directory, sink, subject.auth, **plan.policy)
    try:
        yield archive
    finally:
        archive.engine.dispose()


def run_search_schedule(archive: Archive, subject: Subject, plan: Draw, defect: str = "") -> Result:
    """Run it; ``defect``: of every relay, as ``tests.chaos.broken_search`` has them."""
    began = time.monotonic()
    with archive.relays(plan.relays, _command(defect)) as relays, ThreadPoolExecutor(WRITERS) as writers:
        for begin in range(0, plan.documents, PAGE):
            archive.save(range(begin, min(begin + PAGE, plan.documents)), "new")
        _wait(lambda: archive.left() < plan.documents)
        faults = _storm(archive, subject, relays, plan, writers)
        calm = time.monotonic()
        _wait(lambda: archive.left() == 0)
        drained = time.monotonic() - calm
    left, events, compared = archive.left(), archive.emitted(), archive.compare(examples=10)
    findings = {
        "missing": compared.missing,
        "stale": compared.stale,
        "orphaned": compared.orphaned,
        "failed": len(archive.failed()),
        "stuck": left,
        "miscounted": abs(compared.documents - archive.count()) + (0 if left else compared.in_flight),
    }
    return Result(
        seed=plan.seed,
        database=subject.name,
        events=events,
        receipts=events - left,
        faults=dict(faults),
        findings=findings,
        words=_words(archive, compared) if any(findings.values()) else [],
        seconds=time.monotonic() - began,
        drained=drained,
    )


def _command(defect: str) -> Sequence[str]:
    if not defect:
        return COMMAND
    return "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.chaos.broken_search", defect


def _words(archive: Archive, compared: Reconciled) -> list[str]:
    return [str(compared), *map(str, compared.examples), *archive.troubles().splitlines()]


def _storm(
    archive: Archive, subject: Subject, relays: Relays, plan: Draw, writers: ThreadPoolExecutor
) -> Counter[str]:
    """Let documents change and do harm; how often which."""
    random = Random(plan.seed)
    strikes = _strikes(subject, random)
    struck: Counter[str] = Counter()

    def strike(kind: str) -> None:
        strikes[kind]()
        struck[kind] += 1
        if struck.total() % KILLS == 0:
            relays.kill(struck.total() // KILLS)

    if "refused" in plan.kinds:
        _until_felt(archive, subject, plan)
    for number, kind in enumerate(plan.kinds):
        wave = _wave(archive, plan, number, writers)
        strike(kind)
        while not all(churn.done() for churn in wave):
            strike(random.choice(plan.kinds))
        for churn in wave:
            churn.result()
    unordered = plan.policy.get("ordered") is False
    return struck + Counter({"kill relay": struck.total() // KILLS, "no order": int(unordered)})


def _until_felt(archive: Archive, subject: Subject, plan: Draw) -> None:
    """Refuse connections until a relay has met that. Other harm may pass while all relays are starting."""
    _refuse(subject)
    archive.save([plan.documents], "written while connections are refused")
    _wait(lambda: FELT in archive.logs())
    subject.network.set()


def _refuse(subject: Subject) -> None:
    """Accept no connection, and reset the open ones: a relay that has one would not notice."""
    subject.network.set(refuse=True)
    subject.network.reset()


def _wave(archive: Archive, plan: Draw, number: int, writers: ThreadPoolExecutor) -> list[Future[None]]:
    steps = -(-plan.steps // len(plan.kinds))
    first = WRITERS * (len(plan.kinds) * plan.seed + number)
    halves = [range(at, plan.documents, WRITERS) for at in range(WRITERS)]
    return [writers.submit(archive.churn, half, seed, steps) for seed, half in enumerate(halves, first)]


def _strikes(subject: Subject, random: Random) -> dict[str, Callable[[], None]]:
    """Return the faults of the engine; each is over when its function returns."""
    network, server = subject.network, subject.server

    def for_a_while(begin: Callable[[], object], end: Callable[[], object]) -> Callable[[], None]:
        def strike() -> None:
            begin()
            time.sleep(random.uniform(0.3, 1.0))
            end()

        return strike

    def silence() -> None:
        with server.silent():
            time.sleep(random.uniform(0.3, 1.0))

    return {
        "a hole": for_a_while(lambda: network.set(hole=True), network.set),
        "refused": for_a_while(lambda: _refuse(subject), network.set),
        "reset": for_a_while(network.reset, network.reset),
        "silent": silence,
        "killed": subject.kill,
        **{
            kind: for_a_while(harm, subject.heal)
            for kind, harm in subject.harms.items()
            if not kind.startswith("full")
        },
    }


def _wait(reached: Callable[[], bool]) -> None:
    """Until it is so, or for as long as that may take: the judge sees which."""
    with suppress(AssertionError):
        wait_for(reached, seconds=PATIENCE)
