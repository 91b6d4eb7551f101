"""Name a relay after its process, so that other relays on the host can tell that the process has ended."""

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
"""The relays of this process that are not closed."""


def this_process() -> Member:
    """Return a new member for a relay of this process. Every call returns another name."""
    host, pid = socket.gethostname(), os.getpid()
    name = f"{host[:150]}:{pid}:{_namespace()}-{secrets.token_hex(4)}"
    _ours.add(name)
    return Member(name, host[:255], pid, _version("relaybox"))


def forget(name: str) -> None:
    """Treat a closed relay of this process as ended."""
    _ours.discard(name)


def died(name: str) -> bool:
    """True if the relay of this name ran on this host, in a process that has ended."""
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
    """Return the id of the PID namespace: two containers may have processes with the same number."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""
