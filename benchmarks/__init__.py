"""Benchmarks of Relaybox: ``python -m benchmarks``."""

from __future__ import annotations

import os
import tempfile

# The servers of the tests keep their data in memory by default. Here they use the disk.
os.environ.setdefault("TMPDIR", tempfile.gettempdir())
