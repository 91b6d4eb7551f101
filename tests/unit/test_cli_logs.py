"""How a log is written: for people, and for programs."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from relaybox.cli.levels import LogFormat, LogLevel
from relaybox.cli.logs import JsonFormatter, TextFormatter, colours, configure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(level: int, message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("relaybox.relay", level, "x.py", 1, message, None, extra.pop("exc_info", None))  # type: ignore[arg-type]
    made.created = 1_763_190_000.25
    vars(made).update(extra)
    return made


def raised() -> object:
    try:
        raise ValueError("x")
    except ValueError:
        return sys.exc_info()


def test_a_line_for_people_has_the_time_the_level_and_the_message() -> None:
    line = TextFormatter(colour=False).format(record(logging.WARNING, "runner  paused"))
    assert line[4] == line[7] == "-"
    assert line[19:] == ".250 warning runner  paused"
    assert TextFormatter(colour=False).format(record(logging.CRITICAL, "x")).endswith(" error   x")


def test_on_a_terminal_levels_are_coloured_unless_NO_COLOR_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours(Terminal())
    assert not colours(io.StringIO())
    assert TextFormatter(colour=True).format(record(logging.ERROR, "x")).endswith("\x1b[31merror  \x1b[0m x")
    monkeypatch.setenv("TERM", "dumb")
    assert not colours(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours(Terminal())


def test_an_object_for_programs_has_the_values_of_the_record_and_its_traceback() -> None:
    made = record(logging.INFO, "runner  delivered 1", relay={"event": "summary", "delivered": 1})
    assert json.loads(JsonFormatter().format(made)) == {
        "time": "2025-11-15T07:00:00.250+00:00",
        "level": "info",
        "logger": "relaybox.relay",
        "message": "runner delivered 1",
        "event": "summary",
        "delivered": 1,
    }
    made = record(logging.WARNING, "x", exc_info=raised())
    assert TextFormatter(colour=False).format(made).endswith("\nValueError: x")
    text = JsonFormatter().format(made)
    assert "\n" not in text
    assert json.loads(text)["traceback"].endswith("ValueError: x")


def test_what_the_application_logs_is_written_too_but_no_drivers_secrets() -> None:
    stream = io.StringIO()
    # Those that pytest puts there for each test.
    logging.getLogger().handlers = []
    configure(LogLevel.debug, LogFormat.text, stream)
    logging.getLogger("shop").info("paid")
    logging.getLogger("some.client").debug("password=hush")
    logging.getLogger("relaybox.relay").debug("probing")
    written = stream.getvalue().splitlines()
    assert [line[24:] for line in written] == ["info    paid", "debug   probing"]


def test_an_application_that_has_set_up_logging_keeps_it() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    logging.getLogger().handlers = [logging.StreamHandler(theirs)]
    configure(LogLevel.warning, LogFormat.json, stream)
    logging.getLogger("shop").warning("paid")
    logging.getLogger("relaybox.relay").warning("trouble")
    logging.getLogger("relaybox.relay").info("work")
    assert theirs.getvalue() == "paid\n"
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["trouble"]
