"""Indexes that have in the model the names they have in the database."""

from __future__ import annotations

from django.db import models


class NamedIndex(models.Index):  # type: ignore[misc]
    """An index whose name may be as long as PostgreSQL, MariaDB and SQLite take it; Oracle's limit is 30."""

    max_name_length = 63
