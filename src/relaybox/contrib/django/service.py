"""The operators' service on Django's own connection, for synchronous code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from relaybox.admin import Admin
from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.enter import enter, enter_interruptibly
from relaybox.contrib.django.store import open_store
from relaybox.stores.ledger import SqlLedger

T = TypeVar("T")


def ask(using: str, actor: str, work: Callable[[Admin], Awaitable[T]], *, interruptibly: bool = False) -> T:
    """Do the work with the service; ``actor`` is who the audit will name. ``interruptibly``: by Ctrl-C."""
    # Made here: its database is asked what it is, in this thread.
    ledger = SqlLedger(open_store(using))

    async def asked() -> T:
        return await work(Admin(ledger, get_configuration().settings.destinations, actor))

    return enter_interruptibly(asked) if interruptibly else enter(asked)
