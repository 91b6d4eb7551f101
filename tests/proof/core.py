"""The files that decide whether a promise is kept, and one hash of them all.

Figures count as long as the code of these files is what it was when the figures were taken. Comments,
docstrings and blank lines may change. What shows, configures or operates is left out, and so is what looks
for faults: it may grow without making older figures untrue.
"""

from __future__ import annotations

import ast
import hashlib
import tokenize
from pathlib import Path

from tests.commit import ROOT

PACKAGE = ROOT / "src" / "relaybox"
CORE = (
    "database", "emit", "relay", "sinks", "stores", "wire",
    "core/circuit.py", "core/clock.py", "core/event.py", "core/event_loop.py", "core/ordering.py",
    "core/outcome.py", "core/routing.py", "core/rollout.py", "core/scrub.py",
    "operate/open_relay.py", "operate/pace.py", "receive/inbox.py", "receive/once_handler.py",
    "search/algolia", "search/meilisearch", "search/opensearch", "search/change.py", "search/engine.py",
    "search/http.py", "search/indexes.py", "search/sink.py",
)  # fmt: skip
"""Directories, with everything in them, and modules of the package."""


def files(package: Path = PACKAGE) -> dict[str, Path]:
    """Return every file of the core by its name below the package, in the order of the names."""
    found: dict[str, Path] = {}
    for name in CORE:
        place = package / name
        for file in place.rglob("*.py") if place.is_dir() else [place]:
            found[file.relative_to(package).as_posix()] = file
    return dict(sorted(found.items()))


def digest(package: Path = PACKAGE) -> str:
    """Return the hash of all names and their code. Raise ``FileNotFoundError`` if one of them is gone."""
    whole = hashlib.sha256()
    for name, file in files(package).items():
        whole.update(f"{name} {hashlib.sha256(code(file.read_text()).encode()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def code(source: str) -> str:
    """Return a module without comments, docstrings and blank lines, the same with every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for row in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())
