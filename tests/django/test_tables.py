"""The tables as Django's migrations make them, by the commands of a small project in its own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.db import NotSupportedError

from relaybox.contrib.django.tables import outbox_of
from relaybox.database.migrations import Outbox, check, current_version, ddl, drop, migrate
from tests.databases import KINDS
from tests.django import workers
from tests.django.databases import database
from tests.schema_snapshot import run_script, snapshot

pytestmark = pytest.mark.full

DIALECTS = dict(zip(KINDS, ("postgresql", "mariadb", "sqlite"), strict=True))
NOT_OURS = ("django_migrations", "django_migrations_id_seq", "sqlite_sequence")
WITHOUT_MIGRATIONS = "MIGRATION_MODULES = {'relaybox': None}"
ROUTED_AWAY = """
class Router:
    def allow_migrate(self, db, app_label, **hints):
        return app_label != "relaybox"

DATABASE_ROUTERS = [Router()]
"""

Manage = Callable[..., str]
Migrated = Callable[[str], object]
each_database = pytest.mark.parametrize("kind", DIALECTS)


@pytest.fixture
def manage(tmp_path: Path) -> Manage:
    """Runs a command of a project that has nothing but the outbox, and returns what it prints."""

    def run(url: str, *command: str, settings: str = "", fails: bool = False) -> str:
        (tmp_path / "small_settings.py").write_text(
            "SECRET_KEY = 'of no use'\n"
            "INSTALLED_APPS = ['relaybox.contrib.django']\n"
            "USE_TZ = True\n"
            f"DATABASES = {{'default': {database(url)!r}}}\n"
            f"{settings}\n"
        )
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "small_settings",
            "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path)),
        }
        done = workers.run(environment, "-W", "error", "-m", "django", *command, cwd=tmp_path)
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture(scope="module")
def migrated(module_database: Callable[[str], str]) -> Migrated:
    """Return the schema that ``relaybox migrate`` makes."""

    @cache
    def take(kind: str) -> object:
        url = module_database(kind)
        migrate(url)
        return snapshot(url)

    return take


def made(url: str) -> object:
    return snapshot(url, leave_out=NOT_OURS)


def nothing(url: str) -> bool:
    return not any(snapshot(url, leave_out=NOT_OURS).values())


@each_database
def test_the_tables_are_those_of_relaybox_migrate_and_can_be_taken_away_and_brought_back(
    kind: str, manage: Manage, fresh_database: Callable[[str], str], migrated: Migrated
) -> None:
    url = fresh_database(kind)
    manage(url, "migrate")
    assert made(url) == migrated(kind)
    check(url)
    assert migrate(url) == []
    manage(url, "migrate", "relaybox", "zero")
    assert nothing(url)
    assert current_version(url) == 0
    manage(url, "migrate")
    assert made(url) == migrated(kind)


@each_database
@pytest.mark.fast
def test_tables_that_relaybox_migrate_made_are_left_as_they_are(
    kind: str, manage: Manage, migrated_database: Callable[[str], str], migrated: Migrated
) -> None:
    url = migrated_database(kind)
    manage(url, "migrate")
    assert made(url) == migrated(kind)
    assert "[X] 0001_initial" in manage(url, "showmigrations")


def test_back_to_the_first_version_leaves_the_tables_which_serve_it_too(
    manage: Manage, fresh_database: Callable[[str], str], migrated: Migrated
) -> None:
    url = fresh_database("sqlite")
    manage(url, "migrate")
    manage(url, "migrate", "relaybox", "0001")
    assert made(url) == migrated("sqlite")
    manage(url, "migrate")
    assert made(url) == migrated("sqlite")


@each_database
def test_sqlmigrate_prints_the_statements_wherever_it_is_asked(
    kind: str, manage: Manage, migrated_database: Callable[[str], str]
) -> None:
    url = migrated_database(kind)
    statements = ddl(DIALECTS[kind])  # type: ignore[arg-type]
    printed = "".join(manage(url, "sqlmigrate", "relaybox", number) for number in ("0001", "0002", "0003"))
    places = [printed.find(f"{statement};") for statement in statements]
    assert places == sorted(places)
    assert places[0] > 0
    drops = manage(url, "sqlmigrate", "--backwards", "relaybox", "0001")
    assert all(f"{statement};" in drops for statement in drop(Outbox(DIALECTS[kind])))  # type: ignore[arg-type]


@each_database
def test_django_finds_nothing_to_say_and_nothing_to_migrate(
    kind: str, manage: Manage, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    printed = manage(url, "check", "--database", "default", "--fail-level", "DEBUG")
    assert "no issues (0 silenced)" in printed
    assert "No changes detected" in manage(url, "makemigrations", "--check", "--dry-run")


@each_database
def test_without_migrations_the_tables_are_the_same(
    kind: str, manage: Manage, fresh_database: Callable[[str], str], migrated: Migrated
) -> None:
    url = fresh_database(kind)
    for _ in range(2):
        manage(url, "migrate", "--run-syncdb", settings=WITHOUT_MIGRATIONS)
        assert made(url) == migrated(kind)


def test_a_router_keeps_the_tables_away_and_from_being_dropped(
    manage: Manage, fresh_database: Callable[[str], str]
) -> None:
    for settings in ("", WITHOUT_MIGRATIONS):
        url = fresh_database("sqlite")
        manage(url, "migrate", "--run-syncdb", settings=settings + ROUTED_AWAY)
        assert nothing(url)
    url = fresh_database("sqlite")
    manage(url, "migrate")
    manage(url, "migrate", "relaybox", "zero", settings=ROUTED_AWAY)
    check(url)


STATEMENTS = ddl("mariadb")


@pytest.mark.parametrize("done", [1, 2, len(STATEMENTS) // 2, len(STATEMENTS) - 1])
def test_mariadb_a_migration_that_was_cut_short_is_completed(
    done: int, manage: Manage, fresh_database: Callable[[str], str], migrated: Migrated
) -> None:
    url = fresh_database("mariadb")
    run_script(url, ";\n".join(STATEMENTS[:done]))
    manage(url, "migrate")
    assert made(url) == migrated("mariadb")


def test_mariadb_a_way_back_that_was_cut_short_is_completed(
    manage: Manage, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database("mariadb")
    manage(url, "migrate")
    run_script(url, ";\n".join(drop(Outbox("mariadb"))[:3]))
    manage(url, "migrate", "relaybox", "zero")
    assert nothing(url)


@each_database
def test_tables_of_somebody_else_are_no_tables_of_ours(
    kind: str, manage: Manage, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    run_script(url, "CREATE TABLE outbox_event (id INTEGER)")
    assert "already exists" in manage(url, "migrate", fails=True)
    assert current_version(url) == 0


def test_another_database_is_refused_by_name() -> None:
    connection = SimpleNamespace(vendor="oracle", alias="warehouse")
    with pytest.raises(NotSupportedError, match=r"'warehouse' is on oracle.*PostgreSQL, MariaDB.*router"):
        outbox_of(connection)
