"""What a forked process must not share with its parent is made anew in it."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Renewed(Protocol):
    """Something with threads, locks or loops, which a fork copies in whatever state they are."""

    def after_fork(self) -> None:
        """Begin anew; called in the child before anything else runs there."""
        ...


_all: WeakSet[Renewed] = WeakSet()


def renew_after_fork(one: Renewed) -> None:
    """Call its ``after_fork`` in every child of this process, for as long as it lives."""
    _all.add(one)


def _after_fork() -> None:
    for one in list(_all):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
