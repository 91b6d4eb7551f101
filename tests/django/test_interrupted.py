"""A thread that is interrupted while it delivers: by a soft time limit of Celery's, or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.test import override_settings

from relaybox import Event
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.drain import drain
from tests.django.eager import handled_by

pytestmark = pytest.mark.django_db(transaction=True)


class TooLongError(Exception):
    """What is raised wherever the thread happens to be."""


def test_what_a_drain_began_ends_with_it() -> None:
    """Else its loop would wait for this thread for ever, and the process for that loop."""

    async def slow(event: Event) -> None:
        # When the thread that drains has nothing left to do but to wait for this one.
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        await asyncio.sleep(60)

    def interrupt(*_: Any) -> None:
        raise TooLongError

    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"}), handled_by(slow):
        with transaction.atomic():
            emit_event("order", 1, "order.placed", {})
        before, handler = set(threading.enumerate()), signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(TooLongError):
                drain()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
            assert not thread.is_alive()
        assert drain().finished
