"""Write the log to standard error, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TextIO, TypeAlias

import typer

from relaybox.core.scrub import scrub
from relaybox.core.text import printable

LogLevel = StrEnum("LogLevel", ("debug", "info", "warning", "error"))
LogFormat = StrEnum("LogFormat", ("text", "json"))
LogLevelOption: TypeAlias = Annotated[LogLevel, typer.Option(help="The least important messages.")]
LogFormatOption: TypeAlias = Annotated[LogFormat, typer.Option(help="Lines, or JSON objects.")]

_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_COLOURS = {"debug": _DIM, "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}


class TextFormatter(logging.Formatter):
    """Format as ``2026-11-15 06:10:50.123 info    delivered 12``, in local time.

    Only we write control characters and line breaks: no text from outside looks like a line of ours.
    """

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the indented traceback if there is one."""
        level = _NAMES.get(record.levelno, "error")
        when = f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S.%f}"[:-3]
        said = printable(record.getMessage(), " ")
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            said = "\n  ".join([said, *(printable(line, " ") for line in lines)])
        said = scrub(said)
        if not self._colour:
            return f"{when} {level:<7} {said}"
        return f"{_DIM}{when}{_RESET} {_COLOURS[level]}{level:<7}{_RESET} {said}"


class JsonFormatter(logging.Formatter):
    """Format as ``{"time": …, "level": …, "logger": …, "message": …}``, with the fields of ``relay``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _NAMES.get(record.levelno, "error"),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
            **getattr(record, "relay", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return scrub(json.dumps(document, ensure_ascii=False, default=str))


def configure(
    level: LogLevel = LogLevel.warning, form: LogFormat = LogFormat.text, stream: TextIO | None = None
) -> logging.Handler:
    """Log Relaybox to standard error, and other libraries too unless the root logger has handlers."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == LogFormat.json else TextFormatter(colour=colours(stream)))
    number = logging.getLevelNamesMapping()[level.upper()]
    ours, root = logging.getLogger("relaybox"), logging.getLogger()
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(number)
    if not root.handlers:
        root.addHandler(handler)
        # Debug messages of drivers and clients may contain secrets.
        root.setLevel(max(number, logging.INFO))
        # The driver and its pool repeat for each connection what the relay logs once.
        logging.getLogger("psycopg").setLevel(logging.ERROR)
    # A log that cannot be written must not stop deliveries.
    logging.raiseExceptions = False
    return handler


def colours(stream: TextIO) -> bool:
    """True if the stream is a terminal that shows colours, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
