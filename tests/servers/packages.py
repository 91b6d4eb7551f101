"""What the tests of a tier need on the system, installed before they start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.servers import (
    base,
    chromium,
    debezium,
    faketime,
    kafka,
    mariadb,
    maven,
    nginx,
    opensearch,
    pgbouncer,
    postgres15,
    prometheus,
    rabbitmq,
    redis,
)

FAST: tuple[Callable[[], Any], ...] = (mariadb.programs, redis.program_path)
FULL: tuple[Callable[[], Any], ...] = (
    chromium.program_path,
    maven.java,
    lambda: maven.jars("kafka", *kafka.JARS),
    lambda: maven.jars("debezium", *debezium.JARS),
    lambda: maven.archive("opensearch", opensearch.ZIP),
    nginx.program_path,
    pgbouncer.program_path,
    postgres15.binaries,
    lambda: prometheus.program_path("prometheus"),
    rabbitmq.install,
)
SLICE = (*FAST, faketime.library)
NEEDED = {"fast": FAST, "full": FAST + FULL, "slice": SLICE, "chaos": SLICE + FULL}


def install(tiers: list[str]) -> None:
    """Install what is missing; a line names each thing that cannot be had, whose tests are skipped."""
    for install in dict.fromkeys(each for tier in tiers for each in NEEDED[tier]):
        try:
            install()
        except base.Unavailable as reason:
            print(f"tests: {reason}; its tests are skipped", file=sys.stderr)
