"""Java libraries from the central repository of Maven, with everything they depend on."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.servers import base

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
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
    """The jars of ``group:artifact:version`` and of all they need, fetched once; or raise Unavailable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relaybox", "jars")
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\n".join(coordinates).encode()).hexdigest()[:12]
    kept = cache / f"{name}-{digest}"
    # One at a time: parallel test processes wait for what the first of them fetches.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                # Under its name only when it is whole.
                _fetch(name, coordinates, Path(directory)).rename(kept)
    return sorted(kept.glob("*.jar"))


def java() -> str:
    """The program ``java`` of a development kit, which also runs a source file; or raise Unavailable."""
    if not shutil.which("javac"):
        base.apt_install("default-jdk-headless")
    program = shutil.which("java")
    if not program:
        raise base.Unavailable("java is not on PATH")
    return program


def _fetch(name: str, coordinates: tuple[str, ...], directory: Path) -> Path:
    dependencies = "\n".join(DEPENDENCY.format(*coordinate.split(":")) for coordinate in coordinates)
    pom = directory / "pom.xml"
    pom.write_text(POM.format(name=name, dependencies=dependencies))
    found = directory / "jars"
    copy = [COPY, "-DincludeScope=runtime", f"-DoutputDirectory={found}"]
    try:
        done = subprocess.run(
            [_maven(), "-B", "-q", "-Dstyle.color=never", "-f", pom, *copy],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise base.Unavailable(f"mvn did not fetch the jars of {name} within {SECONDS:g} s") from None
    if done.returncode:
        # The first line says what is wrong, those below it where to read about it.
        reason = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[0]
        raise base.Unavailable(f"mvn did not fetch the jars of {name}: {reason[:300]}")
    return found


def _maven() -> str:
    if not shutil.which("mvn"):
        base.apt_install("maven")
    program = shutil.which("mvn")
    if not program:
        raise base.Unavailable("mvn is not on PATH")
    return program
