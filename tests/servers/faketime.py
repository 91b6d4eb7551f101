"""Processes whose wall clock steps, by libfaketime from Debian's package; the machine's stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base

LIBRARIES = "/usr/lib"
LIBRARY = "faketime/libfaketimeMT.so.1"


class WallClock:
    """The wall clock of processes that were started in its ``environment``; a file steps it for all of them.

    The monotonic clock is the machine's: as where somebody sets the time.
    """

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.step(0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
            # Files keep the time at which they were written.
            "NO_FAKE_STAT": "1",
        }

    @property
    def prefix(self) -> base.Command:
        """Begins a command that is to run by this clock."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items())]

    def step(self, seconds: float) -> None:
        """Be so far ahead of the machine's clock from now on, or behind it."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+f}\n")
        new.chmod(0o644)
        # In one write: a process that reads half of a line would have another time.
        new.replace(self._file)


@contextmanager
def clock() -> Iterator[WallClock]:
    """Yield a clock that is right as yet."""
    preloaded = library()
    with base.workspace() as directory:
        yield WallClock(preloaded, directory / "clock")


def library() -> Path:
    if not (found := _find()):
        base.apt_install("libfaketime")
        found = _find()
    if not found:
        raise base.Unavailable(f"{LIBRARY} is not below {LIBRARIES}")
    return found


def _find() -> Path | None:
    return next(Path(LIBRARIES).glob(f"*/{LIBRARY}"), None)
