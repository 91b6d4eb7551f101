"""What Relaybox costs, measured: ``python -m benchmarks``."""

from __future__ import annotations

import os
import tempfile

# The servers of the tests keep their data in memory, unless this names another place. Here they use the disk.
os.environ.setdefault("TMPDIR", tempfile.gettempdir())
