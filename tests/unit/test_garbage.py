"""A send leaves nothing behind for the garbage collector, which may come late: batches can be large."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Retry
from relaybox.sinks.sink import DELIVERED, Answer, InBatches, OneByOne, Regardless, Sink
from tests.unit.searching import Double, event, sink


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Taking(OneByOne):
    async def deliver(self, delivery: Delivery) -> None:
        pass


class Refusing(OneByOne):
    async def deliver(self, delivery: Delivery) -> None:
        raise Retry("not now")


class TakingBatches(InBatches):
    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        return [DELIVERED] * len(deliveries)


class RefusingBatches(InBatches):
    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        raise Retry("not now")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Taking(2),
        lambda: Refusing(2),
        lambda: TakingBatches(2, size=3),
        lambda: RefusingBatches(2, size=3),
        lambda: sink(Double("documents")),
        lambda: sink(Double()),
    ],
    ids=[
        "one by one",
        "refused one by one",
        "in batches",
        "refused in batches",
        "search",
        "refused by search",
    ],
)
async def test_a_send_frees_its_batch_at_once(make: Callable[[], Sink]) -> None:
    progress = Regardless()
    freed = weakref.ref(progress)
    await make().send([event(str(n), "title") for n in range(9)], progress)
    del progress
    assert freed() is None
