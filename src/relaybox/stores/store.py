"""The contract of a store, which keeps deliveries, leases them, and holds the state that relays share.

- A claim leases due rows to one relay, with attempts + 1 and a new token.
- A settle or extend names the token. If another claim took the row over, it changes nothing and reports it.
- The database's clock decides what is due and when a lease ends.
- Ordered: a claim leases a key's rows from its head on, in one contiguous run. While the head is leased,
  backing off or (``block``) failed, later rows of its key wait.
- A row whose lease expired gets its attempt back. After two expired leases it is a suspect. A claim of
  suspects holds only those with the same number of deaths, half as many with each death, and only heads of
  keys. The attempt counts only if a relay dies that held the suspect alone.
- While a destination is paused or its circuit not closed, claims return the reason; a probe passes a circuit.
- A circuit changes by compare-and-set, so only one of several relays makes the change.
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
    """The destination for copies of failed rows, except test events.

    Copies carry ``relaybox-dead-letter-from`` and ``relaybox-dead-letter-reason`` in their headers. They keep
    their ordering key only if the destination is ``ordered``.
    """

    destination: str
    max_attempts: int = 5
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """A relay's request: at most ``limit`` due rows of one destination, leased for ``lease`` seconds.

    - ``bytes``: limit for payloads and headers together; a larger row is claimed alone.
    - ``suspects``: if false, skip rows whose relays died, and the rows behind them in their key.
    - ``only``: take only these ids; skip a key whose head is another row.
    - ``spread``, ``run``: of many keys take ``spread``, with longer runs of at most ``run`` rows.
    - ``explain``: if false, an empty claim may omit the reason.
    - ``since``: rows due before this may be skipped.
    - ``light``: rows are probably small. The claim is faster, but may be empty if they exceed ``bytes``.
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
    """Why a claim is empty, and the ``seconds`` until a pause ends or a probe may pass (``None``: never)."""

    why: Literal["paused", "open", "half_open"]
    seconds: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of a claim.

    ``failed`` rows failed now, because relays died in all their attempts; if one is locked, it is in
    ``deliveries`` as ``exhausted``. ``parked`` counts rows parked behind their head or failed as unreadable.
    If nothing else came, claim again.
    """

    deliveries: tuple[Delivery, ...] = ()
    failed: tuple[Delivery, ...] = ()
    parked: int = 0
    held: Held | None = None


class Settlement(NamedTuple):
    """The outcome of one delivery."""

    delivery: Delivery
    outcome: Outcome


def bury(delivery: Delivery) -> Failed:
    """Return the outcome of an ``exhausted`` delivery."""
    return Failed(f"the relay died {delivery.crashes} times while it held this event", counts=False)


def used_up(deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """Return the deliveries that were claimed only to be failed."""
    # Check only suspects and claims of one row: the rest are many, and never exhausted.
    if len(deliveries) == 1 or (deliveries and deliveries[0].suspect):
        return tuple(delivery for delivery in deliveries if delivery.exhausted)
    return ()


def is_dead_letter(delivery: Delivery, outcome: Outcome) -> bool:
    """True if a copy of this delivery goes to the dead letters."""
    return isinstance(outcome, Failed) and delivery.event_type != TEST_TYPE


class Store(Protocol):
    """Keeps deliveries; the module's docstring is the contract."""

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
        """Write the outcomes and make the next row of each key due; return the ids of lost leases.

        ``on_failed`` and ``dead_letter`` must match the claims. ``made_due`` is called if a next row is due
        now. If others lock some rows, settle the rest and raise ``RowsLocked``; without ``wait``, at once.
        """
        ...

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Extend the leases to ``lease`` seconds from now; return the ids of lost leases.

        If others lock some rows, extend the rest and raise ``RowsLocked``.
        """
        ...

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        """Set whether the death of the relay that holds this suspect counts.

        After a claim it does not. A lost lease changes nothing.
        """
        ...

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Release untried rows, due now at their old place; return the ids of lost leases."""
        ...

    async def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> bool:
        """Open a closed circuit (if ``probed``, a half-open one); return whether this call did it."""
        ...

    async def probe(self, destination: str, seconds: float) -> bool:
        """Half-open a circuit whose time is over; return whether this call did it.

        A half-open circuit counts too, if its probe did not report within its ``seconds``.
        """
        ...

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; return whether this call did it."""
        ...

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until an operator resumes; return whether this call did it."""
        ...

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Reserve ``count`` slots of ``rate`` per second, which all relays share.

        Return the seconds until the first slot. Unused slots do not accumulate.
        """
        ...

    async def now(self) -> datetime:
        """Return the database's time."""
        ...

    async def close(self) -> None:
        """Close every connection; leases expire on their own."""
        ...
