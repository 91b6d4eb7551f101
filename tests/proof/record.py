"""What runs of the proof came to: one line a part and run, kept with the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tests.commit import ROOT, commit

FILE = ROOT / "docs" / "proof.jsonl"


class Run(msgspec.Struct, frozen=True):
    """One part of one run. ``figures`` are the part's own."""

    part: str
    date: str
    commit: str
    seconds: float
    figures: dict[str, Any]


def made(part: str, seconds: float, figures: Mapping[str, Any]) -> Run:
    return Run(part, datetime.now(UTC).date().isoformat(), commit(), round(seconds, 1), dict(figures))


def keep(run: Run, file: Path = FILE) -> None:
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(run) + b"\n")


def kept(file: Path = FILE) -> list[Run]:
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in file.read_bytes().splitlines() if line]


def total(runs: Iterable[Run], name: str) -> int:
    return sum(run.figures.get(name, 0) for run in runs)
