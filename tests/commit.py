"""The version of the code that runs, so that a run can be repeated."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITTEN = (":!docs/proof.*", ":!docs/performance.*", ":!docs/images/performance-*")
"""What a run itself writes."""


@cache
def commit() -> str:
    """Return the commit's short name, marked if files differ from it; ``unknown`` outside a repository."""
    try:
        changed = _git("status", "--porcelain", "--", ".", *WRITTEN)
        return _git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
