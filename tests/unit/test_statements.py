"""Placeholders, and percent signs that are none."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing

import pytest
import sqlalchemy as sa

from relaybox.database.dialects import DIALECTS, SQLITE
from relaybox.database.schema import make_tables
from relaybox.database.statements import upkeep as upkeep_statements
from relaybox.database.statements.delivery import TEMPLATES, Statements, compile_parameters
from relaybox.stores.sql import destinations, ledger
from relaybox.stores.sql.ledger import QUESTIONS

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


def texts(dialect: str) -> Mapping[str, str]:
    one_statement = DIALECTS[dialect].one_statement
    own = destinations.POSTGRESQL if one_statement else destinations.STEPWISE
    upkeep = upkeep_statements.templates(dialect)
    return {**TEMPLATES[dialect], **own, **upkeep, **QUESTIONS, **ledger.templates(dialect)}


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb"])
def test_no_statement_of_a_driver_that_may_leave_percent_signs_as_they_are_has_any(dialect: str) -> None:
    statements = Statements(TABLES, DIALECTS[dialect], "format", texts(dialect))
    assert [name for name, sql in statements._sql.items() if "%" in sql] == []
