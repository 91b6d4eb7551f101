"""Run the work of a command until SIGTERM or SIGINT ends it."""

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
    """Call the handlers on their signals during the block, from the event loop."""
    # Only the main thread can set signal handlers.
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
    """Install a handler for these signals during the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run_interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work``; a signal cancels it, so that it cleans up, and exits with status 1."""

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
    """End the process at once, without an exception that other code could catch."""
    os._exit(128 + number)


@contextmanager
def stop_requested(
    first: Callable[[signal.Signals], None] | None = None,
    second: Callable[[signal.Signals], NoReturn] = leave,
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first signal. The second ends the process at once."""
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
    """Run ``work`` of a relay; return its result, and True if a signal stopped it.

    The first signal stops the relay. The second ends the process at once with status 128 + signal.
    """
    # Existing objects live as long as the process: scanning them for garbage again and again would take a
    # fifth of a busy relay's time.
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
