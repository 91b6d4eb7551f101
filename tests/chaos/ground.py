"""Where schedules are run, one after the other: a server, warm interpreters, and the means to do harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tests.chaos.cluster import Cluster, Server, Small, running
from tests.chaos.faults import Means
from tests.chaos.nursery import Nursery
from tests.servers import base, faketime, pgbouncer

T = TypeVar("T")


@dataclass(frozen=True)
class Ground:
    """What the schedules of one run share."""

    server: Server
    nursery: Nursery
    clock: faketime.WallClock | None = None
    clocked: Nursery | None = None
    """Whose processes live by that clock."""
    pooler: str | None = None
    """A URL by which the server is reached through a transaction pooler."""

    @property
    def means(self) -> Means:
        return Means(
            server=isinstance(self.server, Cluster),
            listens=self.server.kind.startswith("postgresql"),
            disk=isinstance(self.server, Small),
            clocks=self.clock is not None,
            pooler=self.pooler is not None,
        )


@contextmanager
def prepared(kind: str, *, plain: bool = False, warm: Sequence[str] = ()) -> Iterator[Ground]:
    """A ground on a database of this kind; ``plain``: without stepping clocks and pooler.

    ``warm``: modules that its processes find imported.
    """
    with ExitStack() as stack:
        server = stack.enter_context(running(kind))
        nursery = stack.enter_context(Nursery(warm=warm))
        if plain:
            yield Ground(server, nursery)
            return
        # Whoever shares a file shares the machine and its clock: there is no other that could be right.
        clock = None if kind == "sqlite" else _wanted(stack, faketime.clock())
        clocked = None if clock is None else stack.enter_context(Nursery(clock.environment))
        pooler = None
        if isinstance(server, Cluster) and kind.startswith("postgresql"):
            pooler = _wanted(stack, pgbouncer.server(server.url))
        yield Ground(server, nursery, clock, clocked, pooler)


def _wanted(stack: ExitStack, means: AbstractContextManager[T]) -> T | None:
    """What cannot be had on this machine is done without."""
    try:
        return stack.enter_context(means)
    except base.Unavailable:
        return None
