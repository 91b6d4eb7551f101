"""Debezium's engine with its connector for PostgreSQL, from the central repository of Maven."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tests.servers import base, maven

VERSION = "3.6.0.Final"
JARS = tuple(f"io.debezium:{name}:{VERSION}" for name in ("debezium-embedded", "debezium-connector-postgres"))
SOURCE = Path(__file__).with_name("Engine.java")
OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx512m")
HEARTBEATS = "__debezium-heartbeat."

Record: TypeAlias = dict[str, Any]
"""A message as Kafka would get it: its topic, key, value and headers, texts all of them."""


class Engine:
    """A running engine, and what it has read."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def records(self, count: int, seconds: float = 60.0) -> list[Record]:
        """Return the next records but for heartbeats; fewer if no more came in time."""
        found: list[Record] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and (left := deadline - time.monotonic()) > 0:
            try:
                record: Record = json.loads(self._lines.get(timeout=left))
            except queue.Empty:
                break
            if not record["topic"].startswith(HEARTBEATS):
                found.append(record)
        return found

    def stop(self) -> None:
        """End it in order, so that it keeps how far it came."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(base.START_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def errors(self) -> str:
        """Return what it wrote about itself."""
        return self._log.read_text()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)


@contextmanager
def engine(configuration: Mapping[str, str], directory: Path) -> Iterator[Engine]:
    """Run a connector of this configuration; in ``directory`` it keeps how far it came."""
    classpath = os.pathsep.join(map(str, maven.jars("debezium", *JARS)))
    properties = {
        **configuration,
        "name": configuration["topic.prefix"],
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(directory / "offsets"),
        "offset.flush.interval.ms": "0",
    }
    file, log = directory / "engine.properties", directory / "engine.log"
    escaped = {name: value.replace("\\", "\\\\") for name, value in properties.items()}
    file.write_text("".join(f"{name}={value}\n" for name, value in escaped.items()))
    java = [maven.java(), *OPTIONS, "-cp", classpath, str(SOURCE), str(file)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *java],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        running = Engine(process, log)
        try:
            yield running
        finally:
            running.kill()
