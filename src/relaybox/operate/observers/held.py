"""What holds destinations up, told as it changes: a pause, or a circuit that is not closed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relaybox.core.commands import command
from relaybox.operate.observers.text import one_line, span
from relaybox.stores.store import Held

Tell = Callable[[int, str, str, dict[str, Any]], None]


@dataclass(slots=True)
class _State:
    why: str
    reason: str
    since: float
    maybe_over: bool = False


class Holding:
    """What is known of every destination, by this relay's own changes and by what its claims are told."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._states: dict[str, _State] = {}

    def change(self, destination: str, why: str, reason: str, at: float) -> None:
        """This relay changed the circuit, or paused the destination."""
        if why == "closed":
            self._end(destination, at)
        else:
            self._begin(destination, why, reason, at)

    def see(self, destination: str, held: Held | None, at: float) -> None:
        """A claim was told so."""
        if held is not None:
            self._begin(destination, held.why, held.reason or "", at)
        elif (state := self._states.get(destination)) is None:
            return
        elif state.maybe_over or state.why == "paused":
            self._end(destination, at)
        else:
            # A probe gets through an open circuit: only a second claim in a row says that it is closed.
            state.maybe_over = True

    def _begin(self, destination: str, why: str, reason: str, at: float) -> None:
        before = self._states.get(destination)
        since = before.since if before is not None else at
        self._states[destination] = _State(why, reason or (before.reason if before else ""), since)
        if why == "half_open":
            self._tell(logging.DEBUG, destination, "circuit half-open: one delivery tries", _about(why, ""))
        elif before is None or (why == "paused") != (before.why == "paused") or reason != before.reason:
            word = "paused" if why == "paused" else "circuit open"
            fix = (
                f"; go on with {command(f'resume {destination}')}" if why == "paused" else "; deliveries wait"
            )
            said = f"{word}: {one_line(reason)}{fix}" if reason else f"{word}{fix}"
            self._tell(logging.WARNING, destination, said, _about(why, reason))

    def _end(self, destination: str, at: float) -> None:
        state = self._states.pop(destination, None)
        lasted = f" after {span(at - state.since)}" if state is not None else ""
        resumed = state is not None and state.why == "paused"
        about = {"event": "resumed"} if resumed else _about("closed", "")
        self._tell(logging.INFO, destination, f"{'resumed' if resumed else 'circuit closed'}{lasted}", about)


def _about(state: str, reason: str) -> dict[str, Any]:
    about = {"event": "paused" if state == "paused" else "circuit", "state": state}
    return about | ({"reason": reason} if reason else {})
