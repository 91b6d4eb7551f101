"""RabbitMQ, from Debian's package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers import base

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
MAX_MESSAGE_SIZE = 2_000_000
"""Bytes: the largest message that a server of ours takes."""

CONFIGURATION = """
listeners.tcp.1 = 127.0.0.1:{port}
log.file = false
log.console = true
max_message_size = {largest}
vm_memory_high_watermark.absolute = 512MB
disk_free_limit.absolute = 10MB
load_definitions = {definitions}
"""

GUEST = {"name": "guest", "password": "guest", "tags": ["administrator"]}
READER = {"name": "reader", "password": "reader", "tags": []}
ANYTHING = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
DEFINITIONS = {
    "vhosts": [{"name": "/"}, {"name": "other"}],
    "users": [GUEST, READER],
    "permissions": [
        {"user": "guest", **ANYTHING},
        {"user": "guest", **ANYTHING, "vhost": "other"},
        {"user": "reader", **ANYTHING, "write": ""},
    ],
}
"""The user ``reader`` may not publish, and has no access to the virtual host ``other``."""


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_RABBITMQ, or of a new server."""
    if url := os.environ.get("RELAYBOX_TEST_RABBITMQ"):
        yield url
        return
    with broker() as started:
        yield started.url


@contextmanager
def broker() -> Iterator[Broker]:
    """Yield a new server that can be stopped and started again."""
    install()
    with ExitStack() as stack:
        place, directory = (stack.enter_context(base.workspace()) for _ in range(2))
        # Erlang starts a daemon that outlives everything, unless there is one at the port it looks at.
        epmd = stack.enter_context(base.running(_epmd, place, ready="main select() loop"))
        started = Broker(directory, epmd)
        stack.callback(started.close)
        started.start()
        yield started


def install() -> None:
    """Install the server if it is not there, or raise Unavailable."""
    if not PROGRAMS.is_dir():
        base.apt_install("rabbitmq-server")


def _epmd(port: int) -> base.Command:
    return ["env", "--default-signal=QUIT", "epmd", "-d", "-d", "-address", "127.0.0.1", "-port", str(port)]


class Broker:
    """A server with its data: after a stop it starts on the same port, with what it had."""

    def __init__(self, directory: Path, epmd: int) -> None:
        self._directory = directory
        self._epmd = epmd
        self._running = ExitStack()
        # The server dies with the thread that started it, which may not be one that ends before the broker.
        self._starter = ThreadPoolExecutor(1)
        self.port = 0

    @property
    def url(self) -> str:
        """Return its URL, with the user."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it takes connections."""
        server = base.running(self._command, self._directory, ready="Server startup complete")
        free = self._starter.submit(self._running.enter_context, server).result()
        self.port = self.port or free

    def stop(self) -> None:
        """Return when it has ended in good order: in a crash, what was declared a moment ago is gone."""
        process = self._process()
        self.send(signal.SIGTERM)
        _wait_until(lambda: ") Z " in Path(f"/proc/{process}/stat").read_text())
        self._running.close()

    def close(self) -> None:
        """Stop it for good, and at once."""
        self._running.close()
        self._starter.shutdown()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process(), number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts it is there, and does nothing."""
        self.send(signal.SIGSTOP)
        try:
            threads = list(Path(f"/proc/{self._process()}/task").glob("*/stat"))
            _wait_until(lambda: all(") T " in thread.read_text() for thread in threads))
            yield
        finally:
            self.send(signal.SIGCONT)

    def _process(self) -> int:
        return int((self._directory / "rabbit.pid").read_text())

    def control(self, *arguments: str) -> None:
        """Run rabbitmqctl."""
        command = ["env", *self._environment(), str(PROGRAMS / "rabbitmqctl"), *arguments]
        subprocess.run(base.guarded(command), cwd=self._directory, check=True, capture_output=True)

    def _command(self, free: int) -> base.Command:
        definitions = self._directory / "definitions.json"
        definitions.write_text(json.dumps(DEFINITIONS))
        (self._directory / "rabbitmq.conf").write_text(
            CONFIGURATION.format(port=self.port or free, largest=MAX_MESSAGE_SIZE, definitions=definitions)
        )
        (self._directory / "plugins").write_text("[].\n")
        return ["env", *self._environment(), PROGRAMS / "rabbitmq-server"]

    def _environment(self) -> list[str]:
        settings = {
            # The cookie of the Erlang node lies there.
            "HOME": self._directory,
            "ERL_EPMD_PORT": self._epmd,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP_SECONDS": 0,
            "RABBITMQ_NODENAME": f"relaybox-{self._epmd}@localhost",
            "RABBITMQ_DIST_PORT": base.free_port(),
            "RABBITMQ_CONF_ENV_FILE": self._directory / "none",
            "RABBITMQ_CONFIG_FILE": self._directory / "rabbitmq.conf",
            "RABBITMQ_MNESIA_BASE": self._directory / "data",
            "RABBITMQ_LOG_BASE": self._directory,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self._directory / "plugins",
            "RABBITMQ_PID_FILE": self._directory / "rabbit.pid",
            # Together: the script becomes the server, and does not read its standard input.
            "RABBITMQ_ALLOW_INPUT": 1,
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        return [f"{name}={value}" for name, value in settings.items()]


def _wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + base.STOP_SECONDS
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.02)
