"""Every error Relaybox raises, in one tree.

RelayboxError
├── ConfigError                 a setting, a URL or a name is wrong
│   └── UnknownSetting          no such setting (with "did you mean")
├── MissingExtra                a package of an extra is not installed
├── SchemaError                 the tables are missing or older than this version
├── StoreError                  the database refused or could not be reached; worth a retry
│   ├── NoTables                also a SchemaError: a store found no tables; a running relay waits for them
│   ├── Locked                  another session holds a lock, and the wait for it timed out
│   ├── RowsLocked              other sessions hold some of the rows; the rest was settled or extended
│   └── RowRefused              a row breaks a constraint of its table
└── EmitError                   from ``emit`` and the inbox: nothing was written, the transaction is unchanged
    ├── InvalidField            an argument is empty, too long or of the wrong type
    ├── PayloadError            the payload (or the headers) cannot be stored; ``path`` says where
    ├── Unrouted                no route takes this event type
    ├── UnknownDestination      no such destination
    ├── UnsupportedConnection   not a connection or session that Relaybox supports
    ├── NotInTransaction        the INSERT would commit by itself
    ├── TransactionFailed       the transaction is in error and can only be rolled back
    └── ConnectionClosed        the connection is closed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from uuid import UUID


class RelayboxError(Exception):
    """Base of every error Relaybox raises."""


class ConfigError(RelayboxError, ValueError):
    """A setting is wrong: the message names it, its value and the fix."""


class UnknownSetting(ConfigError):
    """No setting has that name."""

    def __init__(self, name: str, known: Iterable[str], where: str, fix: str | None = None) -> None:
        hint = did_you_mean(name, known) if fix is None else f"; {fix}"
        super().__init__(f"{where} has no setting {name!r}{hint}")


class MissingExtra(RelayboxError, ImportError):
    """A package that an extra installs is missing."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'relaybox[{extra}]'")


class SchemaError(RelayboxError):
    """The tables are missing, or older than this version needs."""


class StoreError(RelayboxError):
    """The database refused a statement or could not be reached. Nothing was written; try again."""


class NoTables(SchemaError, StoreError):
    """A store found a table missing. A running relay retries: the table may be created soon."""


class Locked(StoreError):
    """Another session holds a lock that is needed. Nothing was written; try again."""


class RowsLocked(StoreError):
    """Other sessions hold ``rows``. The rest is settled or extended; ``lost`` ones had lost their lease."""

    def __init__(self, rows: frozenset[UUID], lost: frozenset[UUID]) -> None:
        super().__init__(f"another session has locked {len(rows)} of the rows; end its transaction")
        self.rows = rows
        self.lost = lost


class RowRefused(StoreError):
    """A row breaks a constraint of its table, perhaps after an edit by hand. Nothing was written."""


class EmitError(RelayboxError):
    """The event, or the inbox's mark, was not written. The caller's transaction is unchanged."""


class InvalidField(EmitError, ValueError):
    """An argument is empty, too long or of the wrong type."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}={shorten(value)}: {fix}")
        self.field = field


class PayloadError(EmitError, ValueError):
    """The payload cannot be stored; ``path`` says where, such as ``$.lines[2].price``."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class Unrouted(EmitError, LookupError):
    """No route takes this event type."""


class UnknownDestination(EmitError, LookupError):
    """No destination has that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"no destination is called {name!r}{did_you_mean(name, known)}")


class UnsupportedConnection(EmitError, TypeError):
    """The first argument is not a connection or session that Relaybox supports."""


class NotInTransaction(EmitError):
    """The INSERT would commit by itself, apart from the change it belongs to."""


class TransactionFailed(EmitError):
    """The transaction is in error: the database accepts nothing until it is rolled back."""


class ConnectionClosed(EmitError):
    """The connection is closed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the nearest known name, or lists all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; none is configured"


def shorten(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to a length that fits into a message."""
    try:
        text = repr(value)
    except Exception:
        # Its ``__repr__`` may raise, and Python refuses to print an integer of several thousand digits.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
