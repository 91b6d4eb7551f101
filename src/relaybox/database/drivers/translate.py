"""Errors of drivers as our own, where we have one."""

from __future__ import annotations

from typing import Any

from relaybox.database.dialects import missing_tables
from relaybox.errors import SchemaError, TransactionFailed

_FAILED_TRANSACTION = "25P02"


def translated(error: BaseException) -> BaseException:
    """Our own error where there is one; else the driver's, which callers know how to retry."""
    beneath: Any = getattr(error, "orig", None) or error
    if _FAILED_TRANSACTION in (getattr(beneath, "sqlstate", None), getattr(beneath, "pgcode", None)):
        return _caused(failed("PostgreSQL"), error)
    if missing := missing_tables(beneath):
        return _caused(SchemaError(missing), error)
    return error


def failed(name: str) -> TransactionFailed:
    """Make the error for a transaction that can only be rolled back."""
    return TransactionFailed(
        f"an earlier statement failed, so the {name} transaction can only be rolled back;"
        " roll it back and begin again"
    )


def _caused(ours: Exception, error: BaseException) -> Exception:
    ours.__cause__ = error
    return ours
