"""How much is logged, and in what form."""

from __future__ import annotations

from enum import StrEnum


class LogLevel(StrEnum):
    """The least important messages that are written."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    """How a message is written."""

    text = "text"
    json = "json"
