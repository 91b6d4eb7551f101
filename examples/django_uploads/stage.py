"""All that the example runs: servers and processes, each with a log, in one temporary directory."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from relaybox.demo.processes import Broken, end, free_ports, last_line, postgres

HERE = Path(__file__).parent
CELERY = (sys.executable, "-m", "celery", "--app", "project")
MANAGE = (sys.executable, "manage.py")
START_SECONDS = 60.0


class Stage:
    """Processes by their names, and the environment that they share."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self._web, self._runner, self._redis = free_ports(3)
        self.url = f"http://127.0.0.1:{self._web}/"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "DATABASE_URL": database,
            "SECRET_KEY": secrets.token_urlsafe(),
            "MEDIA_ROOT": str(directory / "media"),
            "RUNNER_URL": f"http://127.0.0.1:{self._runner}/events",
            "RUNNER_SECRET": secrets.token_urlsafe(),
            "RUNNER_TOKEN": secrets.token_urlsafe(),
            "RUNNER_DATABASE": str(directory / "runner.db"),
            "DJANGO_SUPERUSER_PASSWORD": "admin",
            # A Celery worker that is killed leaves its temporary files.
            "TMPDIR": str(directory),
            # Nothing is to be left behind in the project.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start_broker(self, kind: str) -> str:
        """Start Redis if it can be had, else let PostgreSQL hold the messages; what it is."""
        program = redis_server() if kind == "redis" else None
        if program is None:
            driven = self._environment["DATABASE_URL"].replace("postgresql:", "postgresql+psycopg:")
            self._environment["BROKER_URL"] = f"sqla+{driven}"
            return "PostgreSQL"
        keep_nothing = ("--save", "", "--dir", str(self.directory))
        self._start("redis", program, "--port", str(self._redis), "--bind", "127.0.0.1", *keep_nothing)
        self._wait("redis", lambda: listens(self._redis))
        self._environment["BROKER_URL"] = f"redis://127.0.0.1:{self._redis}/0"
        return "Redis"

    def manage(self, *arguments: str) -> None:
        """Run a command of Django."""
        with self._log("manage").open("ab") as log:
            command = [*MANAGE, *arguments]
            done = subprocess.run(command, cwd=HERE, env=self._environment, stdout=log, stderr=log)
        if done.returncode:
            raise Broken(f"manage.py {arguments[0]} failed: {last_line(self._log('manage'))}")

    def start_runner(self) -> None:
        """Start the program that gets the events."""
        self._start("runner", sys.executable, "runner.py")
        self._wait("runner", lambda: listens(self._runner))

    def start_project(self) -> None:
        """Start the web server, a worker and beat."""
        # Without DEBUG, Django serves the admin's style sheets only if one insists.
        self._start("web", *MANAGE, "runserver", "--noreload", "--insecure", f"127.0.0.1:{self._web}")
        self._start("worker", *CELERY, "worker", "--concurrency", "2", "--loglevel", "INFO")
        schedule = ("--schedule", str(self.directory / "beat"), "--pidfile=")
        self._start("beat", *CELERY, "beat", "--loglevel", "INFO", *schedule)
        self._wait("web", lambda: listens(self._web))
        self._wait("worker", lambda: "ready." in self._log("worker").read_text(errors="replace"))

    def stop(self, name: str) -> None:
        """End a process, and what it has started."""
        process = self._processes.pop(name)
        end(process, signal.SIGTERM)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def stop_all(self) -> None:
        """End every process, the latest first."""
        for name in reversed(list(self._processes)):
            self.stop(name)

    def check(self) -> None:
        """Raise ``Broken`` if a process has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise Broken(f"{name} ended with status {process.returncode}: {last_line(self._log(name))}")

    def show_logs(self) -> None:
        """Print the end of each: the logs themselves are gone afterwards."""
        for log in sorted(self.directory.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-20:]
            print(f"--- {log.name}", *lines, sep="\n", file=sys.stderr)

    def _start(self, name: str, *command: str) -> None:
        # Killed by the system when this process dies: a worker that is asked to end waits for its broker.
        guard = ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*guard, *command],
                cwd=HERE,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise Broken(f"{name} was not ready after {START_SECONDS:g} s: {last_line(self._log(name))}")
            time.sleep(0.05)

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@contextmanager
def staged(broker: str) -> Iterator[Stage]:
    """Everything, ready for visitors; whatever becomes of this process, the others end with it."""
    with ExitStack() as stack:
        start_postgres = stack.enter_context(postgres())
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="relaybox-uploads-")))
        print(f"Logs and uploads are in {directory} until the end.", flush=True)
        stage = Stage(directory, start_postgres())
        stack.callback(stage.stop_all)
        print(f"PostgreSQL runs. Celery's broker is {stage.start_broker(broker)}.", flush=True)
        stage.manage("migrate")
        stage.manage("createsuperuser", "--noinput", "--username", "admin", "--email", "admin@example.org")
        stage.start_runner()
        stage.start_project()
        print("The web server, a worker, beat and the runner run.", flush=True)
        try:
            yield stage
        except Exception:
            stage.show_logs()
            raise


def listens(port: int) -> bool:
    """True if a server takes connections at the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def redis_server() -> str | None:
    """The program; where it is missing it is installed, by root on Debian, else there is none."""
    if not shutil.which("redis-server") and shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Debian's redis-server.", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "redis-server"]):
            apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command]
            subprocess.run(apt, env=environment, capture_output=True)
    return shutil.which("redis-server")
