"""Keep one connection that all deliveries of a sink share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar


class Connection(Protocol):
    """A connection to a broker; once broken, it stays broken."""

    @property
    def usable(self) -> bool:
        """True if messages can be sent on it."""
        ...

    async def close(self) -> None:
        """Close it, even if the broker does not answer; it may be closed already."""
        ...


C = TypeVar("C", bound=Connection)


class Shared(Generic[C]):
    """A connection that is opened when it is first needed, and again after it broke.

    ``open`` gets the broken connection, if there is one, and returns the next.
    """

    def __init__(self, open: Callable[[C | None], Coroutine[Any, Any, C]]) -> None:
        self.current: C | None = None
        self._open = open
        self._opening: asyncio.Task[C] | None = None

    async def get(self) -> C:
        """Return the connection; all callers that wait for one wait for the same."""
        current = self.current
        if current is not None and current.usable:
            return current
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(current))
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[C]) -> None:
        if self._opening is opening:
            self._opening = None
            # This reads the exception: asyncio would log it if the callers that waited are gone.
            if not opening.cancelled() and opening.exception() is None:
                self.current = opening.result()

    async def close(self) -> None:
        """Close the connection, also one that is being opened."""
        opening, self._opening = self._opening, None
        current, self.current = self.current, None
        if opening is not None:
            opening.cancel()
            [opened] = await asyncio.gather(opening, return_exceptions=True)
            current = current if isinstance(opened, BaseException) else opened
        if current is not None:
            await current.close()
