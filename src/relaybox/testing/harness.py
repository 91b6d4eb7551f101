"""Helpers that the tests of a store's contract share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Outcome, Released, Retried
from relaybox.stores.store import Settlement, Store, Want

State = Literal["due", "scheduled", "leased", "parked", "delivered", "failed", "discarded"]


class Seen(NamedTuple):
    """What a test looks at in a row."""

    state: State
    attempts: int
    crashes: int
    error: str | None


class Harness(Protocol):
    """What the contract needs of a store beyond its methods."""

    store: Store

    async def emit(
        self,
        destination: str,
        *,
        key: str | None = None,
        max_attempts: int = 5,
        delay: float = 0,
        payload: Any = None,
        headers: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Commit one event, due ``delay`` seconds from now, and return the row's id."""

    async def emit_many(self, destination: str, count: int) -> list[UUID]:
        """Commit events without keys in one transaction, and return the rows' ids."""

    async def see(self, id_: UUID) -> Seen | None:
        """Return the row now, or None."""

    async def pass_time(self, seconds: float) -> None:
        """Make leases, due times and destinations' times ``seconds`` older, as if that time had passed."""

    async def hold(self, destination: str, held: bool, *, seconds: float | None = None) -> None:
        """Pause the destination, for ``seconds`` if given, or resume it."""


LEASE = 60.0


def want(
    limit: int = 100,
    *,
    owner: str = "relay-1",
    skip: bool = False,
    only: Iterable[UUID] | None = None,
    **options: Any,
) -> Want:
    """Ask for rows of the destination that most tests use."""
    chosen = None if only is None else tuple(only)
    return Want("shop", owner, limit, LEASE, on_failed="skip" if skip else "block", only=chosen, **options)


async def emit(harness: Harness, count: int, *, key: str | None = None) -> list[UUID]:
    """Commit events one after the other."""
    return [await harness.emit("shop", key=key) for _ in range(count)]


async def see(harness: Harness, id_: UUID) -> Seen:
    """Return the row, which must exist."""
    seen = await harness.see(id_)
    assert seen is not None
    return seen


async def states(harness: Harness, ids: Iterable[UUID]) -> list[State]:
    """Return the states of rows, which must exist."""
    return [(await see(harness, id_)).state for id_ in ids]


async def take(harness: Harness, wanted: Want) -> tuple[Delivery, ...]:
    """Claim, and return the deliveries."""
    return (await harness.store.claim(wanted)).deliveries


async def claimed(harness: Harness, wanted: Want) -> list[UUID]:
    """Claim, and return the ids in order."""
    return [delivery.id for delivery in await take(harness, wanted)]


async def settle(
    harness: Harness, deliveries: Sequence[Delivery], *outcomes: Outcome, **options: Any
) -> frozenset[UUID]:
    """Settle all alike, or each with its outcome. Return the ids with a lost lease."""
    each = outcomes * len(deliveries) if len(outcomes) == 1 else outcomes
    settlements = [Settlement(*pair) for pair in zip(deliveries, each, strict=True)]
    return await harness.store.settle(settlements, **options)


async def settle_all(harness: Harness, outcome: Outcome) -> frozenset[UUID]:
    """Claim what is due and settle all of it alike."""
    deliveries = await take(harness, want())
    assert deliveries
    return await settle(harness, deliveries, outcome)


async def die(harness: Harness, wanted: Want, *, times: int = 1) -> None:
    """Claim, and let the leases expire, as a dying relay does."""
    for _ in range(times):
        deliveries = await take(harness, wanted)
        assert deliveries
        await hold_alone(harness, deliveries)
        await harness.pass_time(LEASE + 1)


async def hold_alone(harness: Harness, deliveries: Sequence[Delivery]) -> None:
    """Make the death of a lone suspect count, as a relay that holds no other row does."""
    if len(deliveries) == 1 and deliveries[0].suspect:
        await harness.store.hold_alone(deliveries[0], True)


async def drain(harness: Harness, *, limit: int, chance: random.Random | None = None) -> list[UUID]:
    """Claim and settle until nothing is left. Return the ids in order of delivery."""
    delivered: list[UUID] = []
    idle = 0
    while idle < 3:
        claim = await harness.store.claim(want(limit, ordered=True))
        if not claim.deliveries:
            idle += claim.parked == 0
            await harness.pass_time(LEASE + 1)
            continue
        idle = 0
        if chance is not None and chance.random() < 0.1:
            continue
        settlements = _send(claim.deliveries, chance)
        await harness.store.settle(settlements)
        delivered += [s.delivery.id for s in settlements if isinstance(s.outcome, Delivered)]
    return delivered


def _send(deliveries: tuple[Delivery, ...], chance: random.Random | None) -> list[Settlement]:
    """Deliver, but now and then retry a row of a key and release the rest of its run."""
    stopped: set[str | None] = set()
    settlements = []
    for delivery in deliveries:
        if delivery.ordering_key in stopped:
            settlements.append(Settlement(delivery, Released()))
        elif chance is not None and chance.random() < 0.2:
            stopped.add(delivery.ordering_key)
            settlements.append(Settlement(delivery, Retried(5, "try again")))
        else:
            settlements.append(Settlement(delivery, Delivered()))
    return settlements
