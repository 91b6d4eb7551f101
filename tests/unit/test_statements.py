"""Placeholders, and percent signs that are none."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

from relaybox.database.dialects import DIALECTS, SQLITE
from relaybox.database.schema import make_tables
from relaybox.database.statements import destination, inbox, journal, ledger, upkeep
from relaybox.database.statements.delivery import TEMPLATES, Statements, Texts, compile_parameters
from relaybox.stores.sql.expressions import COLUMNS

TABLES = make_tables(sa.MetaData())


def test_a_percent_sign_is_doubled_where_placeholders_have_one_and_the_driver_undoes_it() -> None:
    sql = "SELECT strftime('%f', :at), :at"
    assert compile_parameters(sql, "format", ()) == ("SELECT strftime('%%f', %s), %s", ("at", "at"))
    assert compile_parameters(sql, "qmark", ()) == ("SELECT strftime('%f', ?), ?", ("at", "at"))
    assert compile_parameters(sql, "numeric", ()) == ("SELECT strftime('%f', $1), $2", ("at", "at"))
    query = Statements(TABLES, SQLITE, "format")("now")
    with closing(sqlite3.connect(":memory:")) as connection:
        [[moment]] = connection.execute(query.sql % query.params)
    assert SQLITE.from_time(moment).year >= 2026


def all_texts(dialect: str) -> Iterator[Texts]:
    yield Texts(TEMPLATES[dialect])
    topics = (destination, inbox, journal, upkeep)
    yield from (topic.texts(dialect) for topic in topics)
    yield ledger.texts(dialect, COLUMNS)
    yield upkeep.TASK_MARK
    yield journal.backfill_texts(dialect)
    yield journal.sample_texts(dialect, TABLES)
    yield journal.undelivered_texts(dialect)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb"])
def test_no_statement_of_a_driver_that_may_leave_percent_signs_as_they_are_has_any(dialect: str) -> None:
    of_topics = [Statements(TABLES, DIALECTS[dialect], "format", texts)._sql for texts in all_texts(dialect)]
    assert [name for each in of_topics for name, sql in each.items() if "%" in sql] == []
