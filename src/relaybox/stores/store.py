"""The contract of a store: what a relay does with rows, and with the state that relays share.

A store keeps deliveries and leases them out. Its promises, whatever races or dies:

- A claim leases rows that are due and hands them to one claimant: attempts + 1, a fresh token.
- Every settle and extend names the token. A lease that was taken over changes nothing and is reported.
- The database's clock decides what is due and when a lease ends.
- Ordered: the rows of a key are leased from its head on, in one contiguous run. While the head is leased,
  backing off or (``block``) failed, no later row of its key is handed out.
- A row whose lease ran out gets its attempt back and is claimed again with others. One whose lease ran out
  twice is a suspect: its claim holds suspects alone that died as often, half as many with each death, and
  of a key no more than its head. Only when a relay dies that held one alone does the attempt stay counted.
- While a destination is paused, or its circuit is not closed, claims get nothing but the reason. Only the
  claim that names itself a probe passes a circuit.
- The state of a circuit changes by compare-and-set: of several relays, one makes the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, Protocol
from uuid import UUID

from relaybox.core.event import TEST_TYPE, Delivery
from relaybox.core.outcome import Failed, Outcome

OnFailed = Literal["block", "skip"]

ANY_SIZE = 2**62


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Where a copy of what failed for good goes: a row of the same event for another destination.

    Its headers gain ``relaybox-dead-letter-from`` and ``relaybox-dead-letter-reason``. It keeps its ordering
    key only where that destination is ``ordered``. Test events (``event.TEST_TYPE``) are not copied.
    """

    destination: str
    max_attempts: int = 5
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """What a relay asks for: at most ``limit`` due rows of one destination, leased for ``lease`` seconds.

    Payloads and headers of the rows come to at most ``bytes``. A row that is larger is claimed alone.
    Without ``suspects`` a row whose relays died is left where it is, and what is behind it in its key too.
    With ``only``, rows of these ids alone are taken, and a key whose head is another row is left alone.
    Where more keys wait, ``spread`` of them are enough, each with a longer run, but of no more than ``run``
    rows. Without ``explain`` a claim that gets nothing may leave out why: there is most likely something.
    What was due before ``since`` may be left out. A claim of rows that are most likely ``light`` is quicker,
    and may get nothing if they come to more than ``bytes`` after all.
    """

    destination: str
    owner: str
    limit: int = 100
    lease: float = 60.0
    ordered: bool = False
    on_failed: OnFailed = "block"
    dead_letter: DeadLetter | None = None
    probe: bool = False
    suspects: bool = True
    only: tuple[UUID, ...] | None = None
    spread: int | None = None
    run: int | None = None
    explain: bool = True
    since: datetime | None = None
    light: bool = False
    bytes: int = ANY_SIZE


@dataclass(frozen=True, slots=True)
class Held:
    """Why a claim got nothing: the destination is paused, or its circuit is not closed.

    ``seconds`` until that ends by itself (a pause) or a probe may be made (a circuit); ``None``: it does not.
    """

    why: Literal["paused", "open", "half_open"]
    seconds: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim got.

    ``failed`` were failed on the spot, because relays died in all of their attempts; one that could not be,
    because somebody has locked its row, is among ``deliveries``, ``exhausted``. ``parked`` rows were put
    behind the head of their key, or failed because somebody spoilt them: with nothing claimed but some
    parked, it is worth asking again.
    """

    deliveries: tuple[Delivery, ...] = ()
    failed: tuple[Delivery, ...] = ()
    parked: int = 0
    held: Held | None = None


class Settlement(NamedTuple):
    """What became of one delivery."""

    delivery: Delivery
    outcome: Outcome


def bury(delivery: Delivery) -> Failed:
    """What becomes of a delivery that is ``exhausted``."""
    return Failed(f"the relay died {delivery.crashes} times while it held this event", counts=False)


def used_up(deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """Return what was claimed once more only to be failed."""
    # Others than suspects and lone claims are not looked at one by one: they are many, and none is exhausted.
    if len(deliveries) == 1 or (deliveries and deliveries[0].suspect):
        return tuple(delivery for delivery in deliveries if delivery.exhausted)
    return ()


def is_dead_letter(delivery: Delivery, outcome: Outcome) -> bool:
    """True if a copy of this delivery goes to the dead letters."""
    return isinstance(outcome, Failed) and delivery.event_type != TEST_TYPE


class Store(Protocol):
    """Keeps deliveries. See the module's text for what it promises."""

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        ...

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        on_failed: OnFailed = "block",
        dead_letter: DeadLetter | None = None,
        made_due: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> frozenset[UUID]:
        """Write the outcomes and make the next of each key due; the ids whose lease was lost come back.

        ``on_failed`` and ``dead_letter`` are the destination's policy, the same that its claims name.
        ``made_due`` is called if the next of a key may be claimed now. Where other sessions have locked some
        of the rows, all others are settled and ``RowsLocked`` is raised; without ``wait`` at once.
        """
        ...

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Hold the leases for ``lease`` seconds from now; the ids whose lease was lost come back.

        Where other sessions have locked some of the rows, all others are extended and ``RowsLocked`` is
        raised.
        """
        ...

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        """Have the death of the relay that holds this row count, or (not ``alone``) no longer.

        Only a suspect is held alone. A fresh claim does not count. Nothing changes if the lease was lost.
        """
        ...

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Give untried rows back, due now at their old place; the ids whose lease was lost come back."""
        ...

    async def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> bool:
        """Open a closed circuit (``probed``: a half-open one) for so long; whether this call did it."""
        ...

    async def probe(self, destination: str, seconds: float) -> bool:
        """Make an open circuit whose time is over half-open; whether this call did it.

        So too a half-open one whose ``seconds`` passed without a word from whoever probed.
        """
        ...

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; whether this call did it."""
        ...

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until somebody resumes it; whether this call did it."""
        ...

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Take the next ``count`` places in the line of ``rate`` a second that all relays share.

        Answers in how many seconds the first of them comes; places that nobody took do not gather.
        """
        ...

    async def now(self) -> datetime:
        """The time by the database's clock."""
        ...

    async def close(self) -> None:
        """Give up every connection. Leases are left to run out."""
        ...
