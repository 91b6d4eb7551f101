"""The contract of a store: the four things a relay does with rows.

A store keeps deliveries and leases them out. Its promises, whatever races or dies:

- A claim leases rows that are due and hands them to one claimant: attempts + 1, a fresh token.
- Every settle and extend names the token. A lease that was taken over changes nothing and is reported.
- The database's clock decides what is due and when a lease ends.
- Ordered: the rows of a key are leased from its head on, in one contiguous run. While the head is leased,
  backing off or (``block``) failed, no later row of its key is handed out.
- A row whose lease ran out is a suspect: its attempt is given back and its claim holds it alone. Only
  when a lone claim dies does the attempt stay counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol
from uuid import UUID

from relaybox.event import Delivery
from relaybox.outcome import Outcome

OnFailed = Literal["block", "skip"]


@dataclass(frozen=True, slots=True)
class Want:
    """What a relay asks for: at most ``limit`` due rows of one destination, leased for ``lease`` seconds."""

    destination: str
    owner: str
    limit: int = 100
    lease: float = 60.0
    ordered: bool = False
    on_failed: OnFailed = "block"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim got.

    ``failed`` were failed on the spot, because relays died in all of their attempts. ``parked`` rows were
    put behind the head of their key: with nothing claimed but some parked, it is worth asking again.
    """

    deliveries: tuple[Delivery, ...] = ()
    failed: tuple[Delivery, ...] = ()
    parked: int = 0


class Settlement(NamedTuple):
    """What became of one delivery."""

    delivery: Delivery
    outcome: Outcome


class Store(Protocol):
    """Keeps deliveries. See the module's text for what it promises."""

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        ...

    async def settle(
        self, settlements: Sequence[Settlement], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Write the outcomes and make the next of each key due; the ids whose lease was lost come back.

        ``on_failed`` is the destination's policy, the same that its claims name.
        """
        ...

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Hold the leases for ``lease`` seconds from now; the ids whose lease was lost come back."""
        ...

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Give untried rows back, due now at their old place; the ids whose lease was lost come back."""
        ...

    async def close(self) -> None:
        """Give up every connection. Leases are left to run out."""
        ...
