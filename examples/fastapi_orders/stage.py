"""All that the example runs: servers and processes, each with a log, in one temporary directory."""

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

from broker import Broker, broker

from relaybox.demo.processes import Broken, end, free_ports, last_line, postgres

HERE = Path(__file__).parent
RELAYBOX = (sys.executable, "-m", "relaybox", "--app", "app:outbox")
SECONDS = 60.0


class Stage:
    """Processes by their names, and the environment that they share."""

    def __init__(self, directory: Path, database: str, kafka: Broker) -> None:
        self.directory = directory
        self.kafka = kafka
        self.names = ("consumer", "relay", *(["kafka"] if kafka.is_new else []))
        """What may be killed."""
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "DATABASE_URL": database,
            "KAFKA": kafka.address,
            # Nothing is to be left behind in the project.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._commands = {
            "shop": (sys.executable, "-m", "uvicorn", "app:app", "--port", str(port)),
            "relay": (*RELAYBOX, "relay"),
            "consumer": (sys.executable, "consumer.py"),
        }
        self._ready = {"shop": "running on", "relay": "relays from", "consumer": "waits for orders"}

    def relaybox(self, *arguments: str) -> None:
        """Run a command of an operator to its end."""
        with self._log("relaybox").open("ab") as log:
            command = [*RELAYBOX, *arguments]
            done = subprocess.run(command, cwd=HERE, env=self._environment, stdout=log, stderr=log)
        if done.returncode:
            raise Broken(f"relaybox {arguments[0]} failed: {last_line(self._log('relaybox'))}")

    def start(self, *names: str) -> None:
        """Start them, and wait until they are at work."""
        began = {name: self._launch(name) for name in names if name != "kafka"}
        if "kafka" in names:
            self.kafka.start()
        deadline = time.monotonic() + SECONDS
        for name, before in began.items():
            while self._ready[name].encode() not in self._log(name).read_bytes()[before:]:
                self.check()
                if time.monotonic() > deadline:
                    raise Broken(f"{name} was not ready after {SECONDS:g} s: {last_line(self._log(name))}")
                time.sleep(0.05)

    def _launch(self, name: str) -> int:
        """Start a process; where in its log it begins."""
        # Killed by the system when this process dies.
        guard = ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []
        with self._log(name).open("ab") as log:
            before = log.tell()
            self._processes[name] = subprocess.Popen(
                [*guard, *self._commands[name]],
                cwd=HERE,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return before

    def runs(self, name: str) -> bool:
        """True if it was started, and not killed since."""
        return self.kafka.runs if name == "kafka" else name in self._processes

    def kill(self, name: str) -> None:
        """SIGKILL: it gets no chance to say or save anything."""
        if name == "kafka":
            self.kafka.kill()
            return
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop_all(self) -> None:
        """End every process. Asked twice, they leave at once: nothing is to be kept."""
        for process in self._processes.values():
            process.terminate()
        while self._processes:
            end(self._processes.popitem()[1], signal.SIGTERM)

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

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@contextmanager
def staged(address: str | None) -> Iterator[Stage]:
    """Everything, ready for customers; whatever becomes of this process, the others end with it."""
    with ExitStack() as stack:
        start_postgres = stack.enter_context(postgres())
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="relaybox-orders-")))
        print(f"Logs are in {directory} until the end.", flush=True)
        kafka = stack.enter_context(broker(address))
        stage = Stage(directory, start_postgres(), kafka)
        stack.callback(stage.stop_all)
        print(f"PostgreSQL and Kafka run, Kafka at {kafka.address}.", flush=True)
        stage.relaybox("migrate")
        try:
            stage.start("shop", "relay", "consumer")
            print("The shop, the relay and the warehouse's consumer run.", flush=True)
            yield stage
        except Exception:
            stage.show_logs()
            raise
