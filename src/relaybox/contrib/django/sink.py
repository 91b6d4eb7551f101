"""Synchronous handlers in the thread that drains: on its connection, and in a test in its transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.databases import connection_of
from relaybox.contrib.django.store import is_busy
from relaybox.contrib.django.sync import call
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.errors import PayloadError
from relaybox.sinks.sink import REGARDLESS, Answer, Progress, describe, runs
from relaybox.wire.envelope import event_of
from relaybox.wire.tracing import attached, stored

log = logging.getLogger("relaybox.handler")

SLICE = 0.02
"""Seconds of handlers after which the thread does what else waits for it: leases are extended there too."""

LEFT_OPEN = "the handler left its transaction open, and what it wrote there was rolled back"


class _Line(NamedTuple):
    """What is to be handled: the places of the next of each key, the first of them last, and what follows."""

    deliveries: Sequence[Delivery]
    heads: list[int]
    following: dict[int, int]


class CallersThread:
    """Calls a function with each event, one after the other."""

    keeps_order = True

    def __init__(
        self, using: str, handler: Callable[..., Any], given: Callable[[Delivery], Any] = event_of
    ) -> None:
        self._using = using
        self._handler = handler
        self._given = given

    def limit(self, concurrency: int) -> None:
        """Do nothing: there is one thread."""

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        answers: list[Answer] = [Released()] * len(deliveries)
        heads, following = runs(deliveries)
        line = _Line(deliveries, heads[::-1], following)
        while line.heads:
            part = asyncio.ensure_future(call(self._slice, line, progress))
            try:
                await asyncio.shield(part)
            finally:
                # Also when cancelled: a thread goes on, and what it has handled is not to be handled again.
                for index, answer in await part:
                    answers[index] = answer
                    progress.report(deliveries[index], answer)
        return answers

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    def _slice(self, line: _Line, progress: Progress) -> list[tuple[int, Answer]]:
        """Handle what is in line for a while; after one that did not arrive, the rest of its key is left."""
        end = time.monotonic() + SLICE
        inside = connection_of(self._using).in_atomic_block
        done: list[tuple[int, Answer]] = []
        while line.heads and time.monotonic() < end:
            at = line.heads.pop()
            delivery = line.deliveries[at]
            if not progress.begin(delivery):
                continue
            answer = self._handle(delivery, inside)
            done.append((at, answer))
            if isinstance(answer, Delivered) and at in line.following:
                line.heads.append(line.following[at])
        return done

    def _handle(self, delivery: Delivery, inside: bool) -> Answer:
        try:
            # Inside a test's transaction: a savepoint keeps it usable after a handler's error.
            block = transaction.atomic(using=self._using) if inside else nullcontext()
            with attached(stored(delivery.headers)), block:
                self._handler(self._given(delivery))
        except (Retry, Reject, Unavailable) as answer:
            # An answer is kept for a while, and what it was raised in the midst of can be large.
            answer.__traceback__ = answer.__context__ = answer.__cause__ = None
            return answer
        except PayloadError as error:
            return Reject(str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            log.warning(
                "%s: the handler failed with %s", delivery.destination, describe(error), exc_info=error
            )
            return Retry(describe(error))
        finally:
            left_open = not inside and _roll_back(connection_of(self._using))
        return Retry(LEFT_OPEN) if left_open else Delivered()


def _roll_back(connection: BaseDatabaseWrapper) -> bool:
    """Roll back a transaction that a handler left open, so that later ones commit. True if there was one."""
    if not is_busy(connection):
        return False
    try:
        while connection.in_atomic_block:
            connection.atomic_blocks[-1].__exit__(Retry, Retry(LEFT_OPEN), None)
        if not connection.get_autocommit():
            connection.rollback()
            connection.set_autocommit(True)
    except Error:
        connection.close()
    return True
