"""Kafka in KRaft mode: one node that is broker and controller, of the jars in Maven's central repository."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.servers import base, maven

VERSION = "4.1.1"
JARS = (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.slf4j:slf4j-simple:1.7.36")
PARTITIONS = 4
"""Of a topic that is made when it is first named."""
USER, PASSWORD = "shop", "secret"
"""Who may use the listeners that ask for a user."""

# Its life is short, and its heap small. With -Xrs the signal that ends other servers ends Java as well.
JAVA = (
    *("-Xrs", "-Xms96m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.log.kafka.server=info"),
)
META = """\
version=1
cluster.id=relaybox-tests-00000000
node.id=1
directory.id=relayboxTestsDirectory
"""
SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners={listeners},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={listeners}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,\
SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL
inter.broker.listener.name=PLAINTEXT
listener.name.sasl_ssl.sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
listener.name.sasl_ssl.ssl.keystore.type=PEM
listener.name.sasl_ssl.ssl.keystore.location={keystore}
listener.name.sasl_ssl.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
listener.name.sasl_plaintext.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.ssl.ssl.keystore.type=PEM
listener.name.ssl.ssl.keystore.location={keystore}
listener.name.ssl.ssl.truststore.type=PEM
listener.name.ssl.ssl.truststore.location={certificate}
listener.name.ssl.ssl.client.auth=required
log.dirs={data}
auto.create.topics.enable={auto_create}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
num.partitions={partitions}
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=2097152
num.network.threads=1
num.io.threads=2
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
"""


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_KAFKA, or of a new server, which makes topics as they are named."""
    if url := os.environ.get("RELAYBOX_TEST_KAFKA"):
        yield url
        return
    with broker() as started:
        yield started.url


@contextmanager
def broker(*, auto_create: bool = True) -> Iterator[Broker]:
    """Yield a new server that can be stopped and started again."""
    java, jars = maven.java(), maven.jars("kafka", *JARS)
    with base.workspace() as directory, ExitStack() as stack:
        data = directory / "data"
        data.mkdir()
        (data / "meta.properties").write_text(META)
        certify(directory / "certificate.pem", directory / "keystore.pem")
        classes, settings = ":".join(map(str, jars)), str(directory / "kafka.properties")
        # A shell has what it runs in the background ignore the signal that is to end it.
        command = ["env", "--default-signal=QUIT", java, *JAVA, "-cp", classes, "kafka.Kafka", settings]
        # A server dies with the thread that started it, so that one has to last.
        starter = stack.enter_context(ThreadPoolExecutor(1))
        started = Broker(directory, command, starter, auto_create=auto_create)
        stack.callback(started.stop)
        started.start()
        yield started


class Broker:
    """A server with its data: after a stop it starts on the same ports, with what it had."""

    def __init__(
        self, directory: Path, command: base.Command, starter: ThreadPoolExecutor, *, auto_create: bool
    ) -> None:
        self._directory = directory
        self._java = command
        self._starter = starter
        self._auto_create = auto_create
        self._running = ExitStack()
        self._again = False
        self.port = self.sasl_port = self.tls_port = self.mutual_port = self._controller_port = 0
        self.certificate = directory / "certificate.pem"
        self.keystore = directory / "keystore.pem"

    @property
    def url(self) -> str:
        """Return its URL."""
        return f"kafka://127.0.0.1:{self.port}"

    @property
    def bootstrap(self) -> str:
        """Return its address for Kafka's own clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def sasl_url(self) -> str:
        """Return the URL at which it asks for a user."""
        return f"kafka://{USER}:{PASSWORD}@127.0.0.1:{self.sasl_port}?security=sasl_plaintext"

    @property
    def tls_url(self) -> str:
        """Return the URL at which it asks for a user and shows its certificate."""
        return f"kafka://{USER}:{PASSWORD}@127.0.0.1:{self.tls_port}"

    @property
    def mutual_url(self) -> str:
        """Return the URL at which it asks for the client's certificate, which is the same as its own."""
        return f"kafka://127.0.0.1:{self.mutual_port}"

    def start(self) -> None:
        """Return when it takes connections."""
        # Where this process is root, others may not be able to read the jars.
        running = base.running(self._command, self._directory, ready="Kafka Server started", as_root=True)
        self._starter.submit(self._running.enter_context, running).result()
        self._again = True

    def stop(self) -> None:
        """Kill it, as if it had crashed."""
        self._running.close()

    def pause(self) -> None:
        """Suspend it, so that it is silent."""
        process = self._pid()
        os.kill(process, signal.SIGSTOP)
        # Each of its threads stops when it has a turn.
        while not all(map(_is_stopped, Path(f"/proc/{process}/task").iterdir())):
            time.sleep(0.005)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._pid(), signal.SIGCONT)

    def _command(self, free: int) -> base.Command:
        if not self._again:
            self.port, self.sasl_port, self.tls_port = free, base.free_port(), base.free_port()
            self.mutual_port, self._controller_port = base.free_port(), base.free_port()
        ports = {
            "PLAINTEXT": self.port,
            "SASL_PLAINTEXT": self.sasl_port,
            "SASL_SSL": self.tls_port,
            "SSL": self.mutual_port,
        }
        (self._directory / "kafka.properties").write_text(
            SETTINGS.format(
                listeners=",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
                keystore=self.keystore,
                certificate=self.certificate,
                controller=self._controller_port,
                user=USER,
                password=PASSWORD,
                data=self._directory / "data",
                auto_create=str(self._auto_create).lower(),
                partitions=PARTITIONS,
            )
        )
        return self._java

    def _pid(self) -> int:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if Path(os.readlink(process / "cwd")) == self._directory:
                    return int(process.name)
        raise ProcessLookupError("the server does not run")


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def certify(certificate: Path, keystore: Path) -> None:
    """Write a certificate of 127.0.0.1, and a file that has its key as well."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    certificate.write_bytes(signed)
    keystore.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + signed)
