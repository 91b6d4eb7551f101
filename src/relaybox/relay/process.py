"""The name of a relay, which says what process it is in: others see by it that the process has ended."""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
from importlib.metadata import version

from relaybox.stores.upkeep import Member

_version = functools.cache(version)
_ours: set[str] = set()
"""The relays of this process that were made and not closed."""


def this_process() -> Member:
    """Name a relay of this process. No two have the same name, not even one after the other."""
    host, pid = socket.gethostname(), os.getpid()
    name = f"{host[:150]}:{pid}:{_namespace()}-{secrets.token_hex(4)}"
    _ours.add(name)
    return Member(name, host[:255], pid, _version("relaybox"))


def forget(name: str) -> None:
    """Take a relay that is closed for one that has ended."""
    _ours.discard(name)


def died(name: str) -> bool:
    """Say whether a relay of this name ran on this host, in a process that has ended."""
    match = re.fullmatch(r"(.*):([0-9]+):([0-9a-f]*)-[0-9a-f]+", name, re.DOTALL)
    if match is None or (match[1], match[3]) != (socket.gethostname()[:150], _namespace()):
        return False
    pid = int(match[2])
    if pid == os.getpid():
        return name not in _ours
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _namespace() -> str:
    """Return what tells two processes apart that have the same number in two containers."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""
