"""Runs a plan: ``python -m tests.chaos.crew PLAN`` forks the workers and emitters and replaces the dead.

Forked, not started anew, so that a crash costs no seconds. Ends well when every row is final.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import sqlalchemy as sa

from tests.chaos import emitter, worker
from tests.chaos.plan import Plan, engine, make_outbox

CRASHED = -signal.SIGKILL


class Crew:
    """The processes of one run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._event = make_outbox(plan.url).tables.event
        self._emitters: set[int] = set()
        self._workers: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        """Until every row is final; raises when a process ends in another way than by a planned crash."""
        plan = self._plan
        try:
            for number in range(plan.emitters):
                count = len(range(number, plan.emitted, plan.emitters))
                self._emitters.add(fork(partial(emitter.emit, plan, f"emitter{number}", count)))
            for slot in range(plan.workers):
                self._start_worker(slot, life=0)
            self._watch()
            self._stop()
        finally:
            for pid in (*self._workers, *self._emitters):
                os.kill(pid, signal.SIGKILL)

    def _start_worker(self, slot: int, life: int) -> None:
        may_crash = life < self._plan.crashes_each
        pid = fork(partial(worker.work, self._plan, f"worker{slot}.{life}", may_crash))
        self._workers[pid] = slot, life

    def _watch(self) -> None:
        end = time.monotonic() + self._plan.patience
        look = 0.0
        while True:
            self._bury(replace=True)
            if not self._emitters and time.monotonic() > look:
                if not (left := self._left()):
                    return
                look = time.monotonic() + 0.2
            if time.monotonic() > end:
                raise TimeoutError(f"not at its end after {self._plan.patience:g} s; left: {left}")
            time.sleep(0.01)

    def _stop(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        while self._workers:
            self._bury(replace=False)
            time.sleep(0.01)

    def _bury(self, *, replace: bool) -> None:
        while self._workers or self._emitters:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            slot, life = self._workers.pop(pid, (None, 0))
            self._emitters.discard(pid)
            if slot is None or code != CRASHED:
                if code:
                    raise RuntimeError(f"a process ended with {code}")
            elif replace:
                self._start_worker(slot, life + 1)

    def _left(self) -> dict[str, int]:
        """How many rows are open, by whether they are leased, due or parked."""
        event = self._event.c
        state = sa.case(
            (event.leased_until.is_not(None), "leased"),
            (event.next_attempt_at.is_(None), "parked"),
            else_="waiting",
        )
        count = sa.select(state.label("state"), sa.func.count()).where(event.status == "pending")
        with engine(self._plan.url).connect() as connection:
            return {row[0]: row[1] for row in connection.execute(count.group_by("state"))}


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    Crew(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)).run()
