"""What the tests of search engines share: an index of its own on an engine, and a look at its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.search.engine import Change
from relaybox.sinks.sink import Answer


@dataclass(frozen=True, slots=True)
class Place:
    """An engine, and an index of the test's own on it."""

    engine: Any
    index: str

    @property
    def building(self) -> str:
        return f"{self.index}__building"

    async def write(self, changes: Sequence[Change]) -> list[Answer]:
        return list(await self.engine.write(self.index, changes))

    async def kinds(self, changes: Sequence[Change]) -> list[type[Answer]]:
        return kinds(await self.write(changes))

    async def refused(self, change: Change, kind: type[Answer] = Unavailable) -> str:
        """Write a change that is refused in this way; return the reason."""
        [answer] = await self.write([change])
        assert isinstance(answer, kind), answer
        return reason(answer)

    async def get(self, ids: Sequence[str]) -> Any:
        return await self.engine.get(self.index, ids)

    async def count(self) -> int:
        return await self.engine.count(self.index)

    async def ids(self, index: str = "") -> list[str]:
        return sorted([id_ async for page in self.engine.scan(index or self.index) for id_ in page])

    async def present(self, *names: str) -> Mapping[str, str]:
        """Return which of these exist; without a name, of the index and the one that is built."""
        return await self.engine.present(names or [self.index, self.building])

    async def build(self) -> None:
        await self.engine.create(self.building, like=self.index)

    async def replace(self) -> None:
        await self.engine.replace(self.index, self.building)


def kinds(answers: Sequence[Answer]) -> list[type[Answer]]:
    return [type(answer) for answer in answers]


def rejected(answers: Sequence[Answer]) -> set[int]:
    """Return the places of those that are refused for good."""
    return {at for at, answer in enumerate(answers) if isinstance(answer, Reject)}


def reason(answer: Answer) -> str:
    assert isinstance(answer, Retry | Reject | Unavailable), answer
    return answer.reason
