"""Where things stand: SQL in ``database/`` only, public names where users import them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import relaybox

PACKAGE = Path(relaybox.__file__).parent
EXECUTES = {"ask", "execute", "exec_driver_sql"}
SQL = re.compile(
    r"^\s*(SELECT|INSERT INTO|UPDATE \S+ SET|DELETE FROM|WITH \w+ AS|PRAGMA|VACUUM|LISTEN \w+$|SHOW GRANTS|"
    r"CREATE (TABLE|INDEX|ROLE|USER|PUBLICATION)|ALTER (TABLE|ROLE)|DROP (TABLE|INDEX|COLUMN|NOT NULL)|"
    r"GRANT|REVOKE|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE SAVEPOINT|START TRANSACTION|LOCK TABLE|"
    r"SET (SESSION|LOCAL|TRANSACTION))(\b|$)"
)


def texts(module: Path) -> Iterator[str]:
    """Yield every string of a module but docstrings; of the doctor, whose advice is SQL, what it executes."""
    tree = ast.parse(module.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes: Iterable[ast.AST] = ast.walk(tree)
    if module.parent.name == "doctor":
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        asked = [
            call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in EXECUTES
        ]
        nodes = (node for call in asked for argument in call.args for node in ast.walk(argument))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_sql_stands_in_the_database_folder_alone() -> None:
    elsewhere = [
        f"{module.relative_to(PACKAGE)}: {text.strip()[:60]}"
        for module in sorted(PACKAGE.rglob("*.py"))
        if module.relative_to(PACKAGE).parts[0] != "database"
        for text in texts(module)
        if SQL.search(text)
    ]
    assert elsewhere == []


PUBLIC = {
    "relaybox": ("Outbox", "Destination", "Route", "Event", "Inbox", "Retry", "Reject", "Unavailable"),
    "relaybox.errors": ("RelayboxError", "ConfigError", "EmitError", "NotInTransaction", "StoreError"),
    "relaybox.search": ("Source", "backfill", "abackfill", "reindex", "areindex", "reconcile", "areconcile"),
    "relaybox.testing.contract": ("StoreContract",),
    "relaybox.testing.sink_contract": ("SinkContract",),
    "relaybox.contrib.alembic": (),
    "relaybox.contrib.asgi": ("Receiver",),
    "relaybox.contrib.celery": (),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay_where_they_are(module: str) -> None:
    found = __import__(module, fromlist=["*"])
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


def test_the_top_of_the_package_is_short_enough_to_be_drawn() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "_version.py"}
    assert len(entries) <= 20
