"""All that the example runs: servers and the service, with their logs, in one temporary directory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from engines import Engine, started

from relaybox.demo.processes import Broken, end, free_ports, last_line, postgres

HERE = Path(__file__).parent
READY = "running on"
SECONDS = 60.0


class Stage:
    """The service, and the search engine behind it."""

    def __init__(self, directory: Path, database: str, engine: Engine) -> None:
        self.engine = engine
        [self._port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}/"
        self._log = directory / "service.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            "DATABASE_URL": database,
            "SEARCH_URL": engine.url,
            "SEARCH_KEY": engine.key,
            # Nothing is to be left behind in the project.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self) -> None:
        """Start the service, and wait until it takes requests."""
        # Killed by the system when this process dies.
        guard = ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(self._port), "--no-access-log"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *command],
                cwd=HERE,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while READY not in self._log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise Broken(f"the service was not ready after {SECONDS:g} s: {last_line(self._log)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the service. Asked twice, it leaves at once: nothing is to be kept."""
        if self._process is not None:
            self._process.terminate()
            end(self._process, signal.SIGTERM)

    def check(self) -> None:
        """Raise ``Broken`` if the service has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise Broken(f"the service ended with status {self._process.returncode}: {last_line(self._log)}")

    def show_log(self) -> None:
        """Print the end of it: the log itself is gone afterwards."""
        if self._log.exists():
            lines = self._log.read_text(errors="replace").splitlines()[-30:]
            print(f"--- {self._log.name}", *lines, sep="\n", file=sys.stderr)


@contextmanager
def staged(url: str | None, name: str | None) -> Iterator[Stage]:
    """Everything, ready for people; whatever becomes of this process, the others end with it."""
    with ExitStack() as stack:
        start_postgres = stack.enter_context(postgres())
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="relaybox-documents-")))
        print(f"The service's log is in {directory} until the end.", flush=True)
        engine = stack.enter_context(started(url, name))
        stage = Stage(directory, start_postgres(), engine)
        stack.callback(stage.stop)
        print(f"PostgreSQL runs, and {engine.name} at {engine.where}.", flush=True)
        try:
            stage.start()
            print("The service runs, with a relay inside.", flush=True)
            yield stage
        except Exception:
            stage.show_log()
            raise
