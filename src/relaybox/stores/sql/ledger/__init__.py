"""The ledger in any SQL database: one part for each kind of question, and one for changes."""

from __future__ import annotations

from relaybox.database.statements.journal import texts as journal_texts
from relaybox.database.statements.ledger import texts
from relaybox.stores.sql.expressions import COLUMNS, Expressions
from relaybox.stores.sql.ledger.changes import SqlChanges
from relaybox.stores.sql.ledger.entries import SqlEntries
from relaybox.stores.sql.ledger.journal import SqlHistory, SqlJournal
from relaybox.stores.sql.ledger.overview import SqlOverview
from relaybox.stores.sql.store import SqlStore


class SqlLedger:
    """The ledger in a store's database; ``stores/ledger.py`` has the contract."""

    def __init__(self, store: SqlStore) -> None:
        driver, own = store.driver, store.steps.statements
        expressions = Expressions(own)
        sql = own.others(texts(own.dialect.name, COLUMNS))
        notes = own.others(journal_texts(own.dialect.name))
        self.entries = SqlEntries(driver, sql, expressions)
        self.overview = SqlOverview(driver, sql, expressions)
        self.history = SqlHistory(driver, notes)
        self.journal = SqlJournal(driver, notes)
        self.changes = SqlChanges(driver, sql, expressions, notes)
