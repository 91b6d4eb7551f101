"""The command line, run as its users run it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import sqlalchemy as sa

from relaybox.cli.commands import global_first
from relaybox.core.values import mask_url
from relaybox.database.migrations import DialectName, current_version, migrate
from relaybox.database.roles import grants
from relaybox.database.schema import VERSION
from tests.databases import EVERY_KIND, POSTGRESQL, engine
from tests.integration.project import Project
from tests.schema_snapshot import run_script, snapshot

APPLIED = ("applied 1 (the tables)", "applied 2 (samples and operations)", "applied 3 (settings)")
DEFAULT = "sqlite:///relaybox.db"
SLASHES = "write sqlite:///shop.db (three slashes; four for an absolute path)"
PORT = "the port 'abc' is not a number"

each_database = pytest.mark.parametrize("kind", EVERY_KIND)
Relaybox = Callable[..., str]
Fresh = Callable[[str], str]


@pytest.fixture
def relaybox(tmp_path: Path) -> Relaybox:
    """Runs the command and returns what it said."""
    return Project(tmp_path).run


@each_database
def test_migrate_says_what_it_did(kind: str, relaybox: Relaybox, fresh_database: Fresh) -> None:
    url = fresh_database(kind)
    shown = mask_url(url)
    assert relaybox("migrate", "--database", url) == "".join(f"{shown}: {line}\n" for line in APPLIED)
    assert relaybox("--database", url, "migrate") == f"{shown}: up to date (version 3)\n"
    again = json.loads(relaybox("migrate", "--json", f"--database={url}"))
    assert again == {"database": shown, "applied": [], "version": 3}
    given = relaybox("migrate", "--json", "--prefix", "billing_", RELAYBOX_DATABASE=url)
    assert json.loads(given) == {"database": shown, "applied": [1, 2, 3], "version": 3}


def test_migrate_says_when_nobody_chose_the_database(relaybox: Relaybox, tmp_path: Path) -> None:
    default = f"{DEFAULT} (the default; choose with --app or --database)"
    assert relaybox("migrate") == "".join(f"{default}: {line}\n" for line in APPLIED)
    assert relaybox("migrate") == f"{default}: up to date (version 3)\n"
    chosen = f"{DEFAULT}: up to date (version 3)\n"
    assert relaybox("migrate", "--database", DEFAULT) == chosen
    assert relaybox("migrate", DATABASE_URL=DEFAULT) == chosen
    (tmp_path / "other.toml").write_text('[relaybox]\ndatabase = "sqlite:///relaybox.db"\n')
    assert relaybox("migrate", "--config", "other.toml") == chosen


@each_database
def test_the_printed_sql_gives_the_same_database_as_migrate(
    kind: str, relaybox: Relaybox, fresh_database: Fresh, migrated_database: Fresh
) -> None:
    migrated, by_hand = migrated_database(kind), fresh_database(kind)
    script = relaybox("sql", "--database", by_hand)
    run_script(by_hand, script)
    assert snapshot(by_hand) == snapshot(migrated)
    assert current_version(by_hand) == VERSION
    assert migrate(by_hand) == []
    assert relaybox("sql", "--dialect", kind.partition("-")[0]) == script


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_the_printed_sql_makes_the_schema(kind: str, relaybox: Relaybox, fresh_database: Fresh) -> None:
    url = fresh_database(kind)
    names = ("--schema", "Ours", "--prefix", "billing_")
    run_script(url, relaybox("sql", *names, "--database", url))
    assert relaybox("migrate", *names, "--database", url).endswith(": up to date (version 3)\n")


def test_the_printed_grants_are_those_of_the_dialect(relaybox: Relaybox) -> None:
    no_roles = "-- SQLite has no roles: any process that may write the file may do everything.\n"
    assert relaybox("sql", "--grants") == no_roles
    for dialect in get_args(DialectName):
        script = relaybox("sql", "--grants", "--dialect", dialect, "--prefix", "billing_")
        printed = [f"{statement};" for statement in grants(dialect, prefix="billing_")]
        assert dialect == "sqlite" or script == "\n".join(printed) + "\n"


def test_the_database_is_of_the_flag_then_the_environment_then_the_file(
    relaybox: Relaybox, tmp_path: Path
) -> None:
    def made() -> set[str]:
        names = {path.name for path in tmp_path.glob("*.db")}
        for name in names:
            (tmp_path / name).unlink()
        return names

    relaybox("migrate")
    assert made() == {"relaybox.db"}
    relaybox("migrate", DATABASE_URL="sqlite:///url.db")
    assert made() == {"url.db"}
    (tmp_path / "relaybox.toml").write_text('[relaybox]\ndatabase = "sqlite:///file.db"\n')
    relaybox("migrate", DATABASE_URL="sqlite:///url.db")
    assert made() == {"file.db"}
    relaybox("migrate", RELAYBOX_DATABASE="sqlite:///environment.db")
    assert made() == {"environment.db"}
    relaybox("migrate", "--database", "sqlite:///flag.db", RELAYBOX_DATABASE="sqlite:///environment.db")
    assert made() == {"flag.db"}
    (tmp_path / "other.toml").write_text('[relaybox]\ndatabase = "sqlite:///other.db"\nprefix = "x_"\n')
    relaybox("migrate", "--config", "other.toml")
    assert sa.inspect(engine(f"sqlite:///{tmp_path}/other.db")).has_table("x_outbox_event")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("migrate --database postgresql://me:hush@127.0.0.1:1/db", "postgresql://***@127.0.0.1:1/db: "),
        ("migrate --database mysql://me:hush@127.0.0.1:1/db", "mysql://***@127.0.0.1:1/db: "),
        ("migrate --database oracle://me:hush@host/db", "database = 'oracle://***@host/db': "),
        ("migrate --config nowhere.toml", "nowhere.toml does not exist"),
        ("migrate --prefix 'a\"; drop table x;--'", "prefix = 'a\"; drop table x;--': "),
        ("sql --schema 'a b' --dialect postgresql", "schema = 'a b': "),
        ("--database sqlite://shop.db migrate", f"database = 'sqlite://shop.db': {SLASHES}"),
        ("migrate --database sqlite:///x.db?timeout=soon", "database = 'sqlite:///x.db?***': "),
        ("migrate --database mysql://me:hush@h/db?soon=1", "database = 'mysql://***@h/db?***': "),
        ("migrate --database sqlite://", "database = 'sqlite://': it is in memory"),
        ("migrate --database postgresql://me:hush@h:abc/x", f"database = 'postgresql://***@h:abc/x': {PORT}"),
        ("sql --schema x", "schema = 'x': SQLite has no schemas"),
        ("sql --database mysql://me:hush@127.0.0.1:1/db", "mysql://***@127.0.0.1:1/db: "),
    ],
)
def test_an_error_is_one_line_and_the_status_2(command: str, message: str, relaybox: Relaybox) -> None:
    said = relaybox(*shlex.split(command), status=2)
    assert said.startswith(f"relaybox: {message}")
    assert said.count("\n") == 1
    assert "hush" not in said


@pytest.mark.parametrize("command", ["migrat", "migrate --nothing", "sql --dialect oracle"])
def test_wrong_usage_is_the_status_2(command: str, relaybox: Relaybox) -> None:
    assert "Usage: relaybox" in relaybox(*command.split(), status=2)


@pytest.mark.parametrize(
    ("command", "hints"),
    [
        ("migrate --database", ["Option '--database' requires an argument."]),
        ("--database", ["Option '--database' requires an argument."]),
        ("migrate --json --config", ["Option '--config' requires an argument."]),
        ("migrate --databse x", ["No such option: --databse", "--database"]),
        ("sql --confg=x", ["--config"]),
        ("migrate --prefx x", ["--prefix"]),
    ],
)
def test_a_slip_in_an_option_gets_the_fix(command: str, hints: list[str], relaybox: Relaybox) -> None:
    error = relaybox(*command.split(), status=2).partition("Error: ")[2]
    assert all(hint in error for hint in hints)


def test_the_version_is_the_packages(relaybox: Relaybox) -> None:
    assert relaybox("--version") == f"relaybox {version('relaybox')}\n"


def test_the_help_names_the_exit_statuses_and_has_no_colours(relaybox: Relaybox) -> None:
    for arguments in ((), ("migrate",), ("sql",), ("relay",), ("drain",), ("init",), ("config", "check")):
        text = relaybox(*arguments, "--help", NO_COLOR="1", FORCE_COLOR="1", PY_COLORS="1")
        assert "Exit status: 0 done" in text
        assert all(option in text for option in ("--app", "--config", "--database"))
        assert "\x1b" not in text
        if arguments == ("sql",):
            hint = "A MySQL URL may lead to MariaDB as well, so that server is asked; --dialect avoids that"
            assert hint in " ".join(text.split())


@pytest.mark.parametrize("command", ["", "relay", "drain", "init", "config show"])
def test_the_help_imports_no_database(command: str) -> None:
    code = f"""
import sys
sys.argv = ["relaybox", *{command.split()}, "--help"]
from relaybox.cli import main
try:
    main()
finally:
    heavy = {{"sqlalchemy", "msgspec", "psycopg", "asyncmy", "rich", "aiohttp"}} & set(sys.modules)
    print(heavy, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        (["migrate", "--database", "x", "--json"], ["--database", "x", "migrate", "--json"]),
        (["migrate", "--config=a", "--database=b"], ["--config=a", "--database=b", "migrate"]),
        (["migrate", "--", "--database", "x"], ["migrate", "--", "--database", "x"]),
        (["migrate", "--database"], ["migrate", "--database"]),
        ([], []),
    ],
)
def test_global_options_may_stand_anywhere(arguments: list[str], parsed: list[str]) -> None:
    assert global_first(arguments) == parsed
