"""Many small checks in one test: each goes on after the one before has failed, and all failures are shown."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


class Check(Protocol):
    def __call__(self, place: object, line: int | None = None) -> AbstractContextManager[None]: ...


@contextmanager
def checks() -> Iterator[Check]:
    """Yield the guard of a single check; at the end raise what failed, each with its file and line."""
    failed: list[str] = []
    skipped: list[str] = []

    @contextmanager
    def check(place: object, line: int | None = None) -> Iterator[None]:
        name = place.relative_to(ROOT) if isinstance(place, Path) else place
        try:
            yield
        except pytest.skip.Exception as reason:
            skipped.append(f"{name}: {reason}")
        except Exception as error:
            found = line or _line(error, str(place))
            where = f"{name}:{found}" if found else name
            failed.append(f"{where}: {type(error).__name__}: {error}")

    yield check
    assert not failed, "\n" + "\n".join(failed)
    if skipped:
        pytest.skip("\n".join(skipped))


def _line(error: Exception, file: str) -> int | None:
    """Return the last line of the file that the error came by."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)


def line_at(text: str, position: int) -> int:
    """Return the number of the line that the position is in."""
    return text.count("\n", 0, position) + 1
