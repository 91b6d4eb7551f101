"""OpenSearch: one node, of the distribution that Maven's central repository has for tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base, maven, restart

VERSION = "2.19.3"
"""The last that runs on Java 17 is of 2.19."""
ZIP = f"org.opensearch.distribution.integ-test-zip:opensearch:{VERSION}:zip"
LARGEST = 2 * 1024 * 1024
"""Bytes that it takes in one request."""
READY = "indices into cluster_state"

# Its life is short, and its heap small. With -Xrs the signal that ends other servers ends Java as well.
JAVA = (
    *("-Xrs", "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    *("-Dopensearch.distribution.type=tar", "-Dopensearch.bundled_jdk=false"),
    *("-Dlog4j.shutdownHookEnabled=false", "-Dlog4j2.disable.jmx=true", "-Dio.netty.noUnsafe=true"),
    "-Djava.util.concurrent.ForkJoinPool.common.threadFactory="
    "org.opensearch.secure_sm.SecuredForkJoinWorkerThreadFactory",
)
SETTINGS = """\
cluster.name: relaybox
node.name: one
discovery.type: single-node
network.host: 127.0.0.1
http.port: {port}
http.max_content_length: {largest}b
transport.port: 0
path.data: {directory}/data
path.logs: {directory}/logs
node.processors: 2
cluster.routing.allocation.disk.threshold_enabled: false
"""
LOG = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_OPENSEARCH, or of a new server."""
    if url := os.environ.get("RELAYBOX_TEST_OPENSEARCH"):
        yield url
        return
    with node() as started:
        yield url_of(started)


@contextmanager
def node() -> Iterator[restart.Restartable]:
    """Yield a new server that can be stopped and started again."""
    java, unpacked = maven.java(), maven.archive("opensearch", ZIP)

    def command(port: int, directory: Path) -> base.Command:
        home, config = directory / "home", directory / "config"
        if not home.exists():
            # It refuses to run as root, and other users may not be able to read root's files.
            shutil.copytree(unpacked / f"opensearch-{VERSION}", home)
            config.mkdir()
            config.chmod(0o777)
        settings = SETTINGS.format(port=port, directory=directory, largest=LARGEST)
        (config / "opensearch.yml").write_text(settings)
        (config / "log4j2.properties").write_text(LOG)
        # A shell has what it runs in the background ignore the signal that is to end it.
        begin = ["env", "--default-signal=QUIT", java, *JAVA, f"-Djava.io.tmpdir={directory}"]
        paths = [f"-Dopensearch.path.home={home}", f"-Dopensearch.path.conf={config}", "-cp", f"{home}/lib/*"]
        pid_file = str(directory / restart.PID_FILE)
        return [*begin, *paths, "org.opensearch.bootstrap.OpenSearch", "--pidfile", pid_file]

    with restart.running(command, READY) as started:
        yield started


def url_of(started: restart.Restartable) -> str:
    """Return the URL of a server for a destination, without an index."""
    return f"opensearch://127.0.0.1:{started.port}"
