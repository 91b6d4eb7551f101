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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.databases import KINDS, engine
from tests.integration.clinic import Clinic
from tests.waiting import wait_for

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

    def until(self, text: str) -> None:
        """Read until a text is on the screen."""

        def shown() -> bool:
            self._read()
            return text in self.seen

        wait_for(shown, lambda: f"{text!r} in {self.seen[-3000:]!r}")

    def press(self, keys: str) -> None:
        """Forget what was seen, and press keys."""
        self.seen = ""
        os.write(self.keyboard, keys.encode())

    def ends(self) -> int:
        """Return its exit status when it has ended."""

        def has_ended() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_for(has_ended, lambda: self.seen[-3000:])
        while self._read():
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """True if the terminal is as it was before."""
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
def clinic(
    request: pytest.FixtureRequest,
    migrated_database: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Clinic:
    monkeypatch.chdir(tmp_path)
    return Clinic(migrated_database(getattr(request, "param", "sqlite")), tmp_path)


@pytest.fixture
def opened() -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_(*arguments: Any, **options: Any) -> Terminal:
        terminals.append(Terminal(*arguments, **options))
        return terminals[-1]

    yield open_
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize("clinic", KINDS, indirect=True)
def test_without_a_terminal_one_frame_is_printed(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
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
    for text in (ENTER, "runner", "q quit"):
        terminal.until(text)
    clinic.emit()
    clinic.emit()
    terminal.until("waiting 2 ")
    terminal.press("q")
    assert terminal.ends() == 0
    assert terminal.is_restored()


def test_a_destination_is_paused_and_resumed_after_a_question(clinic: Clinic, opened: Open) -> None:
    # A look in between could show that it is paused a moment before the next key counts.
    terminal = opened(clinic, "--interval", "1h")
    terminal.until("runner")
    terminal.press("p")
    terminal.until("pause runner? y/n")
    terminal.press("n")
    terminal.until("q quit")
    assert "paused" not in clinic.run("status")
    terminal.press("py")
    terminal.until("paused runner")
    assert "paused in relaybox top" in clinic.run("status")
    terminal.press("p")
    terminal.until("resume runner? y/n")
    terminal.press("y")
    terminal.until("resumed runner")
    assert "paused" not in clinic.run("status")
    terminal.press("q")
    assert terminal.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_restores_the_terminal(
    clinic: Clinic, opened: Open, number: signal.Signals
) -> None:
    terminal = opened(clinic)
    terminal.until("runner")
    terminal.process.send_signal(number)
    assert terminal.ends() == 0
    assert terminal.is_restored()


def test_a_narrow_terminal_without_colours(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, columns=40, NO_COLOR="1")
    terminal.until("runner")
    terminal.until("q quit")
    terminal.press("q")
    assert terminal.ends() == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.seen)


def test_a_dumb_terminal_gets_one_frame(clinic: Clinic, opened: Open) -> None:
    terminal = opened(clinic, TERM="dumb")
    assert terminal.ends() == 0
    assert "runner" in terminal.seen
    assert ENTER not in terminal.seen


@pytest.mark.parametrize("clinic", ["postgresql-18"], indirect=True)
def test_a_lost_database_is_reported_and_tried_again(
    clinic: Clinic, opened: Open, postgres18_url: str
) -> None:
    name = sa.make_url(clinic.url).database
    terminal = opened(clinic, "--interval", "200ms")
    terminal.until("runner")
    with engine(postgres18_url, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.exec_driver_sql(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"  # noqa: S608
        )
        terminal.press("")
        terminal.until("no answer from the database")
        connection.exec_driver_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    clinic.emit()
    terminal.until("waiting 1 ")
    terminal.press("q")
    assert terminal.ends() == 0
    assert terminal.is_restored()
