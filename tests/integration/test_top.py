"""``relaybox top`` in a terminal: it shows, obeys keys, survives the database, and leaves no trace."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.clinic import Clinic

SECONDS = 30.0
ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A terminal in which ``relaybox top`` runs."""

    def __init__(self, clinic: Clinic, *arguments: str, columns: int = 100, **env: str) -> None:
        self.keyboard, self._other = pty.openpty()
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self._other)
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        command = [sys.executable, "-m", "relaybox", "--database", clinic.url, "top", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=clinic.directory,
            env=kept | {"TERM": "xterm-256color"} | env,
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.seen = ""

    def until(self, reached: Callable[[str], Any], what: str) -> None:
        """Read until what is on the screen is so."""
        deadline = time.monotonic() + SECONDS
        while not reached(self.seen):
            assert time.monotonic() < deadline, (what, self.seen[-3000:])
            self._read()

    def press(self, keys: str) -> None:
        """Forget what was seen, and press keys."""
        self.seen = ""
        os.write(self.keyboard, keys.encode())

    def ends(self) -> int:
        """Its status, when it has left."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-3000:]
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """Whether the terminal is as it was."""
        modes = termios.tcgetattr(self._other)[:4] == self.before[:4]
        left = self.seen.rfind(LEAVE) > self.seen.rfind(ENTER)
        return modes and left and SHOW_CURSOR in self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.keyboard)
        os.close(self._other)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.keyboard], [], [], 0.05)
        if ready:
            self.seen += os.read(self.keyboard, 65536).decode(errors="replace")
        return bool(ready)


Open = Callable[..., Terminal]


@pytest.fixture
def clinic(fresh_database: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clinic:
    monkeypatch.chdir(tmp_path)
    return Clinic(fresh_database("sqlite"), tmp_path)


@pytest.fixture
def opened() -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_(*arguments: Any, **options: Any) -> Terminal:
        terminals.append(Terminal(*arguments, **options))
        return terminals[-1]

    yield open_
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize("kind", ["postgresql-18", "mariadb", "sqlite"])
def test_one_frame_is_printed_where_there_is_no_terminal(
    kind: str, fresh_database: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    clinic = Clinic(fresh_database(kind), tmp_path)
    clinic.emit()
    clinic.run("relay", "--once")
    clinic.emit()
    text = clinic.run("top")
    assert "\x1b" not in text
    assert re.search(r"^runner +ok +1 +0 +0 ", text, re.MULTILINE)
    assert re.search(r"delivered 0\.[0-9]/s", text)
    assert clinic.run("top", "--once", "--interval", "1s").splitlines()[2:4] == text.splitlines()[2:4]


def test_a_bad_interval_is_refused(clinic: Clinic) -> None:
    assert "--interval" in clinic.run("top", "--interval", "1ms", status=2)
    assert "--interval" in clinic.run("top", "--interval", "soon", status=2)


def test_it_shows_what_happens_and_leaves_with_q(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, "--interval", "200ms")
    terminal.until(lambda seen: ENTER in seen and "runner" in seen and "q quit" in seen, "the first frame")
    clinic.emit()
    clinic.emit()
    terminal.until(lambda seen: "waiting 2 " in seen, "what was emitted meanwhile")
    terminal.press("q")
    assert terminal.ends() == 0
    assert terminal.is_restored()


def test_a_destination_is_paused_and_resumed_after_a_question(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, "--interval", "200ms")
    terminal.until(lambda seen: "runner" in seen, "the first frame")
    terminal.press("p")
    terminal.until(lambda seen: "pause runner? y/n" in seen, "the question")
    terminal.press("n")
    terminal.until(lambda seen: "q quit" in seen, "no answer is no")
    assert "paused" not in clinic.run("status")
    terminal.press("py")
    terminal.until(lambda seen: "paused runner" in seen, "it is paused")
    assert "paused in relaybox top" in clinic.run("status")
    terminal.press("p")
    terminal.until(lambda seen: "resume runner? y/n" in seen, "the other question")
    terminal.press("y")
    terminal.until(lambda seen: "resumed runner" in seen, "it is resumed")
    assert "paused" not in clinic.run("status")
    terminal.press("q")
    assert terminal.ends() == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_and_the_terminal_is_as_before(
    clinic: Clinic, opened: Open, number: signal.Signals, status: int
) -> None:
    terminal = opened(clinic)
    terminal.until(lambda seen: "runner" in seen, "the first frame")
    terminal.process.send_signal(number)
    assert terminal.ends() == status
    assert terminal.is_restored()


def test_a_narrow_terminal_without_colours(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, columns=40, NO_COLOR="1")
    terminal.until(lambda seen: "runner" in seen and "q quit" in seen, "the first frame")
    terminal.press("q")
    assert terminal.ends() == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.seen)


def test_a_dumb_terminal_gets_one_frame(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, TERM="dumb")
    assert terminal.ends() == 0
    assert "runner" in terminal.seen
    assert ENTER not in terminal.seen


def test_a_database_that_goes_away_is_told_and_tried_again(
    tmp_path: Path, opened: Open, postgres18_url: str, fresh_database: Callable[[str], str]
) -> None:
    clinic = Clinic(fresh_database("postgresql-18"), tmp_path)
    name = sa.make_url(clinic.url).database
    terminal = opened(clinic, "--interval", "200ms")
    terminal.until(lambda seen: "runner" in seen, "the first frame")
    admin = sa.create_engine(
        sa.make_url(postgres18_url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.exec_driver_sql(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"  # noqa: S608
        )
        terminal.press("")
        terminal.until(lambda seen: "no answer from the database" in seen, "that it is away")
        connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    admin.dispose()
    clinic.emit()
    terminal.until(lambda seen: "waiting 1 " in seen, "that it is there again")
    terminal.press("q")
    assert terminal.ends() == 0
    assert terminal.is_restored()
