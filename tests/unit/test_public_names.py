"""What ``relaybox`` offers, and that it costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import relaybox

NAMES = [
    *("Call", "Destination", "Emitted", "Event", "EventSource", "Inbox", "Outbox", "Reject"),
    *("RelayboxError", "Retry", "Route", "Unavailable", "__version__", "make_tables"),
]


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(relaybox.__all__) == NAMES
    assert set(NAMES) <= set(dir(relaybox))
    for name in NAMES:
        assert getattr(relaybox, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        relaybox.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("contrib.alembic", ("downgrade", "include_name", "include_object", "upgrade")),
        ("contrib.asgi", ("Receiver",)),
        ("contrib.celery", ("inbox_task",)),
        ("testing.checker", ("Committed", "Received", "Report", "check")),
        ("testing.contract", ("StoreContract",)),
        ("testing.harness", ("Harness", "Seen")),
        ("testing.probe", ("OutboxProbe",)),
        ("testing.sink_contract", ("SinkContract", "SinkHarness")),
    ],
)
def test_what_users_import_from_modules_stays_there(module: str, names: tuple[str, ...]) -> None:
    found = import_module(f"relaybox.{module}")
    assert [name for name in names if not hasattr(found, name)] == []


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


def test_importing_the_package_and_making_an_outbox_load_nothing_else() -> None:
    assert not {"sqlalchemy", "msgspec", "asyncio"} & loaded_after("import relaybox")
    drivers = {"psycopg", "psycopg2", "asyncpg", "pymysql", "MySQLdb", "asyncmy", "aiosqlite", "sqlite3"}
    assert not drivers & loaded_after("from relaybox import Outbox; Outbox('postgresql://localhost/x')")
