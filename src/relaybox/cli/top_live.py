"""The live screen of ``relaybox top``: a frame after each look, and keys in between."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.live import Live

from relaybox.cli.signals import on_signals
from relaybox.cli.status import shown_name
from relaybox.cli.top_layout import View, collect, draw
from relaybox.errors import RelayboxError
from relaybox.operate.admin import Admin, DestinationStats
from relaybox.sinks.sink import describe

PATIENCE = 10.0
"""Seconds for one look; then the database counts as gone, until the next one."""

UP, DOWN = "\x1b[A", "\x1b[B"
_ALSO = {"k": UP, "j": DOWN, "\x1bOA": UP, "\x1bOB": DOWN}


class LiveScreen:
    """Show what ``admin`` says, again and again, until the operator leaves."""

    def __init__(self, admin: Admin, where: str, console: Console, interval: float) -> None:
        self._admin = admin
        self._console = console
        self._interval = interval
        self._view = View(where)
        self._changed = asyncio.Event()
        self._left = False
        self._doing: asyncio.Task[None] | None = None
        """The action that the operator asked for; one at a time."""
        self._asked: tuple[str, bool] | None = None
        """The destination of the question, and True to resume it; the selection may change meanwhile."""

    async def run(self) -> None:
        """Show it until q, the end of the terminal, SIGTERM, or a cancellation."""
        with ExitStack() as stack:
            self._view.keys = stack.enter_context(_keys(self._press))
            stack.enter_context(on_signals({signal.SIGTERM: self._leave, signal.SIGWINCH: self._changed.set}))
            live = stack.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
            looking = asyncio.create_task(self._look())
            try:
                while not self._left:
                    live.update(self._screen(), refresh=True)
                    await self._changed.wait()
                    self._changed.clear()
            finally:
                await _end(looking, self._doing)

    def _screen(self) -> Any:
        width, height = self._console.size
        return draw(self._view, width, height)

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                async with asyncio.timeout(PATIENCE):
                    self._view.frame = await collect(self._admin)
                self._view.trouble = None
            except (RelayboxError, OSError, TimeoutError) as error:
                self._view.trouble = str(error) or f"none within {PATIENCE:g} s"
            self._choose(0)
            self._changed.set()
            await asyncio.sleep(max(0.0, self._interval - (clock() - begun)))

    def _leave(self) -> None:
        self._left = True
        self._changed.set()

    def _press(self, key: str) -> None:
        """Do what a key says; an empty one is the end of the terminal."""
        key = _ALSO.get(key, key)
        if self._view.question is not None and key:
            if key in "yY" and self._asked is not None:
                self._doing = asyncio.create_task(self._pause_or_resume(*self._asked))
            self._view.question = self._asked = None
        elif key in ("q", "Q", ""):
            self._left = True
        elif key in (UP, DOWN):
            self._choose(-1 if key == UP else 1)
        elif key in ("p", "P"):
            self._ask()
        self._changed.set()

    def _choose(self, step: int) -> None:
        names = [one.name for one in self._view.destinations()]
        if not names:
            return
        chosen = self._view.selected
        at = names.index(chosen) if chosen in names else 0
        self._view.selected = names[min(max(at + step, 0), len(names) - 1)]

    def _ask(self) -> None:
        one = self._selected()
        if one is None or (self._doing is not None and not self._doing.done()):
            return
        self._view.notice = None
        self._asked = one.name, _is_held(one)
        self._view.question = f"{'resume' if _is_held(one) else 'pause'} {shown_name(one)}?"

    def _selected(self) -> DestinationStats | None:
        return next((one for one in self._view.destinations() if one.name == self._view.selected), None)

    async def _pause_or_resume(self, name: str, resume: bool) -> None:
        try:
            if resume:
                await self._admin.resume(name)
                self._view.notice = f"resumed {name}"
            else:
                await self._admin.pause(name, "paused in relaybox top")
                self._view.notice = f"paused {name}"
            self._view.frame = await collect(self._admin)
        except (RelayboxError, OSError) as error:
            self._view.notice = describe(error)
        self._changed.set()


def _is_held(one: DestinationStats) -> bool:
    return one.place is not None and (one.place.paused or one.place.circuit != "closed")


async def _end(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@contextmanager
def _keys(press: Any) -> Iterator[bool]:
    """Call ``press`` with each key, without its echo; yield True if there is a keyboard."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            text = os.read(keyboard, 64).decode(errors="replace")
        except OSError:
            text = ""
        for key in _split(text):
            press(key)

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield True
    finally:
        loop.remove_reader(keyboard)
        # A terminal that is gone needs nothing.
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _split(text: str) -> list[str]:
    """Split into single keys; an arrow is three characters. An empty text is the end of the terminal."""
    if not text:
        return [""]
    keys: list[str] = []
    while text:
        length = 3 if text.startswith(("\x1b[", "\x1bO")) else 1
        keys.append(text[:length])
        text = text[length:]
    return keys
