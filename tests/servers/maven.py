"""What the central repository of Maven has: Java libraries with everything they depend on, and archives."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.servers import base

PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1"
SECONDS = 600.0

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>relaybox</groupId>
  <artifactId>{name}</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
DEPENDENCY = (
    "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)


def jars(name: str, *coordinates: str) -> list[Path]:
    """Return the jars of ``group:artifact:version`` and all they need, fetched once, or raise Unavailable."""
    return sorted(_kept(name, coordinates, _fetch_jars).glob("*.jar"))


def archive(name: str, coordinate: str) -> Path:
    """Fetch and unpack ``group:artifact:version:zip`` once and return its directory, or raise Unavailable."""
    return _kept(name, (coordinate,), _fetch_archive)


def java() -> str:
    """Return ``java`` of a development kit, which also runs a source file, or raise Unavailable."""
    base.program("javac", "default-jdk-headless")
    return base.program("java", "default-jdk-headless")


def _kept(
    name: str, coordinates: tuple[str, ...], fetch: Callable[[str, tuple[str, ...], Path], Path]
) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relaybox", "jars")
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:12]
    kept = cache / f"{name}-{digest}"
    # One at a time: parallel test processes wait for what the first of them fetches.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            print(f"tests: fetching {name} from Maven's central repository", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                # Under its name only when it is whole.
                fetch(name, coordinates, Path(directory)).rename(kept)
    return kept


def _fetch_jars(name: str, coordinates: tuple[str, ...], directory: Path) -> Path:
    dependencies = "\n".join(DEPENDENCY.format(*coordinate.split(":")) for coordinate in coordinates)
    pom = directory / "pom.xml"
    pom.write_text(POM.format(name=name, dependencies=dependencies))
    found = directory / "jars"
    copy = [f"{PLUGIN}:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={found}"]
    _run(f"the jars of {name}", "-f", str(pom), *copy)
    return found


def _fetch_archive(name: str, coordinates: tuple[str, ...], directory: Path) -> Path:
    _run(name, f"{PLUGIN}:copy", f"-Dartifact={coordinates[0]}", f"-DoutputDirectory={directory}")
    found = directory / "unpacked"
    with zipfile.ZipFile(next(directory.glob("*.zip"))) as packed:
        packed.extractall(found)
    return found


def _run(what: str, *arguments: str) -> None:
    try:
        done = subprocess.run(
            [_maven(), "-B", "-q", "-Dstyle.color=never", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise base.Unavailable(f"mvn did not fetch {what} within {SECONDS:g} s") from None
    if done.returncode:
        # The first line says what is wrong, those below it where to read about it.
        reason = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[0]
        raise base.Unavailable(f"mvn did not fetch {what}: {reason[:300]}")


def _maven() -> str:
    return base.program("mvn", "maven")
