"""An example that runs: started by its command, used through its terminal and a browser, and ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from playwright.sync_api import Locator, Page, expect, sync_playwright

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore"}
PICTURES = os.environ.get("RELAYBOX_TEST_PICTURES")
"""A directory for screenshots; without it, none are taken."""
PATIENCE = 30_000
"""Milliseconds that the browser waits."""


def command(example: str) -> list[str]:
    """What starts an example."""
    return [sys.executable, "-B", str(EXAMPLES / example / "run.py")]


def files(example: str) -> set[Path]:
    """What lies in its directory."""
    return set((EXAMPLES / example).rglob("*"))


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """For temporary files; unlike pytest's it is open to the user that servers run as."""
    with TemporaryDirectory(prefix="relaybox-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def running(example: str, directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The example, until the end of the block."""
    process = subprocess.Popen(
        [*command(example), *options],
        env=ENVIRONMENT | {"TMPDIR": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.terminate()
            process.wait(60)


def said(output: IO[str], end: str) -> str:
    """What it prints up to these words."""
    text = ""
    for line in output:
        text += line
        if end in line:
            return text
    raise AssertionError(f"it ended without {end!r}:\n{text}")


def tell(process: subprocess.Popen[str], text: str) -> None:
    """Write a line to its terminal."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def found(pattern: str, text: str) -> str:
    """The group of the pattern in what it said."""
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def directory_of(text: str) -> Path:
    """The directory that it works in."""
    return Path(found(r"in (\S+) until the end", text))


@contextmanager
def browsing(chromium: str) -> Iterator[Page]:
    """A page of a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 460})
        page.set_default_timeout(PATIENCE)
        try:
            yield page
        finally:
            browser.close()


def shows(place: Locator, text: str) -> None:
    """Wait until the place has the text."""
    expect(place).to_contain_text(text, timeout=PATIENCE)


def picture(page: Page, name: str) -> None:
    """Take a screenshot, where they are wanted."""
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / name, animations="disabled")


def descendants(pid: int) -> list[int]:
    """The processes that it started, and those that they did."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [other for child in children for other in descendants(child)]


def alive(processes: list[int]) -> list[str]:
    """The command lines of those that still run."""
    return list(filter(None, map(_command_line, processes)))


def _command_line(pid: int) -> str:
    try:
        # That of a process that has ended, and that nobody has asked about yet, is empty.
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
