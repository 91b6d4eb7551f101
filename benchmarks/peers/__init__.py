"""Other outboxes, each in its best documented configuration; ``make bench`` installs them."""

from __future__ import annotations

from benchmarks.peers import (
    django_outbox_pattern,
    faststream_outbox,
    pgqueuer,
    procrastinate,
    txoutbox,
)
from benchmarks.peers.base import Peer

PEERS: list[Peer] = [
    txoutbox.peer(keeps=True),
    txoutbox.peer(keeps=False),
    faststream_outbox.peer(),
    pgqueuer.peer(),
    procrastinate.peer(keeps=True),
    procrastinate.peer(keeps=False),
    django_outbox_pattern.peer(200, 1_000, 5_000),
]
"""Peers to tune for their rate."""

PROMPT: list[Peer] = [
    txoutbox.prompt(),
    faststream_outbox.prompt(),
    pgqueuer.prompt(),
    procrastinate.prompt(),
    django_outbox_pattern.peer(200),
]
"""Peers to tune for short waits."""

__all__ = ["PEERS", "PROMPT", "Peer"]
