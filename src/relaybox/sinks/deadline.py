"""Limit the time of many blocks with one timer: one for each can cost more than a delivery."""

from __future__ import annotations

import asyncio
from types import TracebackType

from relaybox.core.outcome import Unavailable

TURNS = 3
"""Turns of the event loop before a block expires, so that an answer that is already here is taken. On a busy
machine the time may be over before the loop reads the answer; uvloop even runs timers first."""


def no_answer(where: str, seconds: float) -> Unavailable:
    """Return the answer to what was sent to ``where`` and not answered in this time."""
    return Unavailable(f"no answer from {where} within {seconds:g}s")


class Deadline:
    """Gives all blocks the same time, so they expire in the order they began: ``with deadline():``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._blocks: dict[Block, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> Block:
        """Return a block; when its time is over, its task gets a ``TimeoutError``."""
        return Block(self)

    def add(self, block: Block) -> float:
        """Start the time of a block; return its end by the loop's clock."""
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
        """Stop the time of a block."""
        self._blocks.pop(block, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for block in list(self._blocks):
            if block.end > now:
                self._timer = loop.call_at(block.end, self._expire, loop)
                return
            del self._blocks[block]
            loop.call_soon(block.expire, loop, TURNS)
        self._timer = None


class Block:
    """One piece of work under a deadline, in one task."""

    __slots__ = ("_cancelling", "_deadline", "_over", "_task", "end", "expired")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.end = 0.0
        self.expired = False
        self._over = False

    def __enter__(self) -> Block:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self.end = self._deadline.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._deadline.remove(self)
        # If something else cancelled the task as well, it stays cancelled.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """Cancel the task of the block after some turns of the loop, unless the block ends before."""
        if self._over:
            return
        if turns:
            loop.call_soon(self.expire, loop, turns - 1)
            return
        self.expired = True
        self._task.cancel()
