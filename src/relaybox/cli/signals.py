"""Work in the process of a command that SIGTERM and SIGINT end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from relaybox.cli.output import complain
from relaybox.core.event_loop import run
from relaybox.core.text import span

if TYPE_CHECKING:
    from relaybox.relay.relay import Relay

T = TypeVar("T")
log = logging.getLogger("relaybox.relay")

STOP = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_signals(handlers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Call a handler when its signal comes, until the end of the block."""
    # Only the main thread can listen to signals.
    listens = threading.current_thread() is threading.main_thread()
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items() if listens else ():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers if listens else ():
            loop.remove_signal_handler(number)


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Let a handler of the process take these signals, until the end of the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run_interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do the work; a signal cancels it, so that it clears up, and the status is 1 then."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        with on_signals(dict.fromkeys(STOP, task.cancel)):
            return await work()

    try:
        return run(main())
    except asyncio.CancelledError:
        complain("interrupted")
        raise


def leave(number: signal.Signals) -> NoReturn:
    """End the process without exceptions: a handler that swallows them could delay the end."""
    os._exit(128 + number)


@contextmanager
def stop_requested(
    first: Callable[[signal.Signals], None] | None = None,
    second: Callable[[signal.Signals], NoReturn] = leave,
) -> Iterator[Callable[[], bool]]:
    """Yield what returns True after the first signal. The second signal ends the process at once."""
    asked: list[signal.Signals] = []

    def ask(number: signal.Signals) -> None:
        if asked:
            second(number)
        asked.append(number)
        if first is not None:
            first(number)

    with on_signals({number: partial(ask, number) for number in STOP}):
        yield lambda: bool(asked)


def run_relay(relay: Relay, work: Callable[[], Coroutine[Any, Any, T]], patience: float) -> tuple[T, bool]:
    """Do the work of a relay; return its result, and True if a signal ended it early.

    The first signal stops the relay, the second ends the process at once, with 128 and the signal's number
    for its status.
    """
    # The process is the relay's own: what was made up to now stays, and to look through it for garbage again
    # and again would take a fifth of a busy relay's time.
    gc.freeze()

    def stop(number: signal.Signals) -> None:
        log.info(
            "stopping (%s): no more is claimed, what is being sent has %s; a second signal leaves at once",
            number.name,
            span(patience),
            extra={"relay": {"event": "stopping", "signal": number.name}},
        )
        relay.stop()

    async def main() -> tuple[T, bool]:
        with stop_requested(stop, _leave_relay) as asked:
            return await work(), asked()

    return run(main())


def _leave_relay(number: signal.Signals) -> NoReturn:
    log.warning(
        "left at once (%s): what was being sent is taken over when its leases run out",
        number.name,
        extra={"relay": {"event": "left", "signal": number.name}},
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    leave(number)
