"""Decide which rows a claim may take: the rules for order and for suspects, without a database.

A key's *head* is its first open row by position (pending, or failed if that blocks). A claim looks at a
window of due rows and finds the head of each key in it. It takes the head with the contiguous run behind it.
If the head may not be taken, the window's other rows of its key are parked behind it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


def fitting(key: str) -> str:
    """Return the key; shorten a long one to its beginning and a digest, so that keys stay distinct."""
    if len(key) <= 255:
        return key
    return f"{key[:190]}#{hashlib.sha256(key.encode()).hexdigest()}"


class Candidate(NamedTuple):
    """An open row as a claim sees it.

    - ``free``: pending, due or parked, and not leased.
    - ``suspect``: how many relays died holding it, if that makes it a suspect, else 0.
    - ``size``: bytes of payload and headers, if they were asked for.
    """

    id: Any
    key: str | None
    position: int
    free: bool
    suspect: int
    size: int = 0


class Choice(NamedTuple):
    """The ids to lease, in order, and the ids to park."""

    take: list[Any]
    park: list[Any]


def unordered(window: Sequence[Candidate], limit: int, most: int) -> list[Any]:
    """Return the ids to lease from an unordered window."""
    return [row.id for row in within(_alike(window)[:limit], most)]


def within(rows: Sequence[Candidate], most: int) -> Iterator[Candidate]:
    """Yield the first rows that fit into ``most`` bytes together, but at least one."""
    total = 0
    for index, row in enumerate(rows):
        total += row.size
        if index and total > most:
            return
        yield row


def share(limit: int, keys: int, due: int, most: int | None) -> int:
    """Return how many rows of one key a claim looks at: at least those due, but at most ``most``.

    A due row left in the window, neither claimed nor parked, would take the place of another key's row.
    """
    return min(max(1, limit // max(1, keys), due), most or limit)


def runs(
    heads: Iterable[Candidate],
    rows: Iterable[Candidate],
    only: Collection[Any] | None = None,
    most: int | None = None,
) -> dict[str | None, list[Candidate]]:
    """Return each head's run of free rows; a suspect is alone.

    With ``only``, a run ends before the first row with another id. It has at most ``most`` rows.
    """
    by_key: dict[str | None, list[Candidate]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.position):
        by_key[row.key].append(row if only is None or row.id in only else row._replace(free=False))
    return {head.key: _run(head, by_key[head.key])[:most] for head in heads}


def _run(head: Candidate, rows: Sequence[Candidate]) -> list[Candidate]:
    run = [head]
    for row in rows:
        if row.position <= head.position:
            continue
        if head.suspect or row.suspect or not row.free:
            break
        run.append(row)
    return run


def choose(
    window: Sequence[Candidate],
    heads: dict[str | None, Candidate],
    runs: dict[str | None, list[Candidate]],
    locked: Mapping[Any, int],
    limit: int,
    most: int,
) -> Choice:
    """Return what an ordered claim takes and parks. ``locked`` has the sizes of the rows it locked.

    A key without a head in ``heads`` is being claimed by another relay, and is skipped. Rows behind a suspect
    are parked too; otherwise they keep other suspects out of the window.
    """
    candidates: list[Candidate] = []
    for row in _first_of_each_key(window):
        for member in [row] if row.key is None else runs.get(row.key, ()):
            if member.id not in locked:
                break
            candidates.append(member._replace(size=locked[member.id]))
    blocking = {
        key: head.id
        for key, head in heads.items()
        if not head.free or (head.suspect and key in runs and head.id in locked)
    }
    park = [row.id for row in window if blocking.get(row.key, row.id) != row.id and row.id in locked]
    return Choice([row.id for row in within(_alike(candidates)[:limit], most)], park)


def _first_of_each_key(window: Iterable[Candidate]) -> Iterable[Candidate]:
    seen: set[str] = set()
    for row in window:
        if row.key is None:
            yield row
        elif row.key not in seen:
            seen.add(row.key)
            yield row


def _alike(rows: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return some suspects with as many deaths as the first row; if it is not a suspect, all non-suspects."""
    first = rows[0].suspect if rows else 0
    within = rows[: together(first)] if first else rows
    return [row for row in within if row.suspect == first]


ALONE = 1000
"""Added to a row's ``crashes`` while the death of the relay that holds it would count."""


def together(deaths: int) -> int:
    """Return how many suspects are claimed together: half as many with each death, down to one."""
    return 64 >> min(max(deaths, 2), 6)
