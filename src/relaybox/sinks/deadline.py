"""A time limit for many blocks of code at once.

A timer of the event loop for each delivery costs more than many a delivery. Where all limits are equally
long, blocks end in the order in which they began, and one timer for the oldest of them is enough.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """Gives every block the same number of seconds: ``with deadline() as block``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._blocks: dict[Block, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> Block:
        """A block that begins when it is entered; its task gets a ``TimeoutError`` when its time is over."""
        return Block(self)

    def add(self, block: Block) -> float:
        """When its time is over, by the loop's clock."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # The blocks of another loop ended with it.
            self._loop, self._timer = loop, None
            self._blocks.clear()
        end = loop.time() + self.seconds
        self._blocks[block] = None
        if self._timer is None:
            self._timer = loop.call_at(end, self._expire, loop)
        return end

    def remove(self, block: Block) -> None:
        """It has ended."""
        self._blocks.pop(block, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for block in list(self._blocks):
            if block.end > now:
                self._timer = loop.call_at(block.end, self._expire, loop)
                return
            del self._blocks[block]
            block.expire()
        self._timer = None


class Block:
    """One piece of work under a deadline, in one task."""

    __slots__ = ("_cancelling", "_deadline", "_task", "end", "expired")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.end = 0.0
        self.expired = False

    def __enter__(self) -> Block:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self.end = self._deadline.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.remove(self)
        # A task that somebody else cancelled as well stays cancelled.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Its time is over."""
        self.expired = True
        self._task.cancel()
