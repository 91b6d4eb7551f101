"""Judge whether deliveries flow: due rows are claimed, and claimed rows are settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relaybox.core.text import circuit_word, stated
from relaybox.operate.why import is_alive
from relaybox.stores.journal import Flow
from relaybox.stores.ledger import DestinationState, Relay


@dataclass(frozen=True, slots=True)
class Problem:
    """Why deliveries do not flow, at a destination or (None) everywhere, and for how many seconds."""

    destination: str | None
    reason: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Health:
    """``ready``: nothing keeps due rows from being delivered."""

    ready: bool
    problems: tuple[Problem, ...]


def patience(rate: float | None, stalled_after: float) -> float:
    """Return the seconds without a settle before a destination is stalled: at least two sends at its rate."""
    return stalled_after if rate is None else max(stalled_after, 2 / rate)


def judge(
    flows: Mapping[str, Flow],
    places: Mapping[str, DestinationState],
    relays: Iterable[Relay],
    stalled_after: Mapping[str, float],
) -> Health:
    """Return what is wrong. A paused destination is not a problem: it waits on purpose."""
    paused = {name for name, place in places.items() if place.paused}
    open_for_work = {name: flow for name, flow in flows.items() if flow.pending and name not in paused}
    alive = any(map(is_alive, relays))
    waits = [flow.due_seconds for flow in open_for_work.values() if flow.due_seconds is not None]
    problems = []
    if waits and not alive:
        problems.append(Problem(None, "no relay is alive, and work is due", max(waits)))
    for name, flow in sorted(open_for_work.items()):
        place = places.get(name)
        if place is not None and place.circuit != "closed":
            # No record says since when: each probe updates the row of the destination and of what it tried.
            text = f"its circuit is {circuit_word(place.circuit)}: {stated(place.circuit_reason)}"
            problems.append(Problem(name, text, None))
        elif alive and (flow.due_seconds or 0.0) >= stalled_after[name] and not flow.settles:
            problems.append(Problem(name, "work is due and nothing settles", flow.due_seconds))
    return Health(not problems, tuple(problems))
