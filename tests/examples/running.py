"""An example that runs: started by its command, used through its terminal and a browser, and ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.conftest import give_up
from tests.waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore"}
PICTURES = os.environ.get("RELAYBOX_TEST_PICTURES")
"""A directory for screenshots; without it, none are taken."""
PATIENCE = 60_000
"""Milliseconds that the browser waits."""


def check(example: str, directory: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Have the example check itself."""
    return subprocess.run(
        [*_command(example), "--check", *options],
        env=ENVIRONMENT | {"TMPDIR": str(directory)} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def checked(example: str, directory: Path, *options: str, steps: int) -> str:
    """Return what an example prints that checks itself in so many steps, and leaves no file behind."""
    before = _files(example)
    done = check(example, directory, *options)
    if "no search engine:" in done.stderr:
        give_up("search engine", done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert len(re.findall(r"^ok .*", done.stdout, re.MULTILINE)) == steps
    left = list(directory.rglob("*"))
    assert left == [], f"the example left files behind: {left}"
    assert _files(example) == before
    return done.stdout


def _command(example: str) -> list[str]:
    return [sys.executable, "-B", str(EXAMPLES / example / "run.py")]


def _files(example: str) -> set[Path]:
    return set((EXAMPLES / example).rglob("*"))


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """For temporary files; unlike pytest's it is open to the user that servers run as."""
    with TemporaryDirectory(prefix="relaybox-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def running(example: str, directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run the example until the end of the block."""
    process = subprocess.Popen(
        [*_command(example), *options],
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
    """Return what it prints up to these words."""
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
    """Return the group of the pattern in what it printed."""
    match = re.search(pattern, text)
    assert match, text
    return match[1]


@contextmanager
def browsing(chromium: str, height: int = 460, width: int = 1100, **options: Any) -> Iterator[Page]:
    """Yield a page of a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, **options)
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


def killed(process: subprocess.Popen[str], others: int) -> None:
    """Kill the example: everything that it started, so many processes at least, ends with it."""
    started = _descendants(process.pid)
    assert len(started) >= others
    process.kill()
    process.wait()
    _gone(started)


def interrupted(process: subprocess.Popen[str], directory: Path) -> None:
    """Press Ctrl-C: everything ends, and nothing is left."""
    started = _descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    _gone(started)
    left = list(directory.rglob("*"))
    assert left == [], f"the example left files behind: {left}"


def _gone(processes: list[int]) -> None:
    wait_for(lambda: not any(map(_command_line, processes)), lambda: f"{[*map(_command_line, processes)]}")


def _descendants(pid: int) -> list[int]:
    """Return the processes that it started, and those that they started."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [other for child in children for other in _descendants(child)]


def _command_line(pid: int) -> str:
    try:
        # It is empty if the process has ended and was not waited for yet.
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
