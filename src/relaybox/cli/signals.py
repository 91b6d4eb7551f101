"""A relay in the process of a command: run to its end, and told to stop by signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from relaybox.observers.text import span
from relaybox.parts import run
from relaybox.relay.relay import Relay

T = TypeVar("T")
log = logging.getLogger("relaybox.relay")


def run_relay(relay: Relay, work: Callable[[], Coroutine[Any, Any, T]], patience: float) -> tuple[T, bool]:
    """Do the work; what it came to, and whether a signal ended it early.

    The first SIGTERM or SIGINT stops the relay, the second ends the process at once, with 128 and the
    signal's number for its status.
    """
    asked: list[signal.Signals] = []

    # The process is the relay's own: what was made up to now stays, and to look through it for garbage again
    # and again would take a fifth of a busy relay's time.
    gc.freeze()

    async def main() -> T:
        with _signals(relay, asked, patience):
            return await work()

    return run(main()), bool(asked)


@contextmanager
def _signals(relay: Relay, asked: list[signal.Signals], patience: float) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        if asked:
            _leave(number)
        asked.append(number)
        log.info(
            "stopping (%s): no more is claimed, what is being sent has %s; a second signal leaves at once",
            number.name,
            span(patience),
            extra={"relay": {"event": "stopping", "signal": number.name}},
        )
        relay.stop()

    # Only the main thread can listen to signals.
    listens = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if listens else ()
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _leave(number: signal.Signals) -> NoReturn:
    """Not by way of exceptions: a handler that swallows them could hold up the end."""
    log.warning(
        "left at once (%s): what was being sent is taken over when its leases run out",
        number.name,
        extra={"relay": {"event": "left", "signal": number.name}},
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(128 + number)
