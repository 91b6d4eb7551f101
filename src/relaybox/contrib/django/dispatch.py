"""After the commit, notify Celery or a relay, as ``OUTBOX["DISPATCH"]`` says; the caller sees no error.

If that fails, the rows stay where they are, and the next sweep, or a relay that polls, finds them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_settings
from relaybox.contrib.django.private import in_tests

log = logging.getLogger("relaybox.django")


class Dispatch:
    """The events of one transaction, and the hook that runs once it has committed.

    An event that was emitted in a savepoint which was rolled back may be among them: its rows are not found.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.rows: defaultdict[str, list[str]] = defaultdict(list)
        self.done = False

    def __call__(self) -> None:
        """Notify Celery or a relay, once."""
        if self.done:
            return
        self.done = True
        try:
            tell(self.using, self.rows)
        except Exception as error:
            log.warning(
                "nobody could be told of %d deliveries on %s, which the next sweep will find: %s: %s",
                sum(map(len, self.rows.values())),
                self.using,
                type(error).__name__,
                error,
            )


def after_commit(connection: BaseDatabaseWrapper, rows: Iterable[tuple[str, str]]) -> None:
    """Notify Celery or a relay of these rows, destination and id, once the transaction has committed.

    If none is open, that is now; for one that is managed by hand Django has no hook.
    """
    if not connection.in_atomic_block and not connection.get_autocommit():
        return
    hooks = connection.run_on_commit
    open_ = (hook[1] for hook in reversed(hooks) if isinstance(hook[1], Dispatch) and not hook[1].done)
    dispatch = next(open_, None) or Dispatch(connection.alias)
    for destination, row in rows:
        dispatch.rows[destination].append(row)
    # A hook is dropped with the savepoint it was made in: there is one for each, and the first to run tells.
    if not hooks or hooks[-1][:2] != (set(connection.savepoint_ids), dispatch):
        transaction.on_commit(dispatch, using=connection.alias)


def tell(using: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Notify Celery or a relay that these rows are there, ids by destination."""
    if by_celery():
        from relaybox.contrib.django.tasks import deliver_or_queue

        deliver_or_queue(using, rows)
    elif get_settings().DISPATCH in ("auto", "relay") and rings():
        from relaybox.contrib.django.outbox import get_outbox

        get_outbox(using).wake(*rows)


def by_celery() -> bool:
    """True if Celery's workers deliver."""
    kind = get_settings().DISPATCH
    return kind == "celery" or (kind == "auto" and has_celery())


def deliverer() -> str | None:
    """Return what delivers where no relay runs, in words; None if Celery does not."""
    if not by_celery():
        return None
    return f"a Celery worker, at the latest in the next sweep (every {get_settings().SWEEP_INTERVAL:g} s)"


def rings() -> bool:
    """True if relays of other processes are notified of a commit.

    None of them serves the databases of Django's tests, and a connection that stays open to notify one would
    keep them from being dropped.
    """
    return get_settings().DISPATCH == "relay" or not in_tests()


def has_celery() -> bool:
    """True if the project has a Celery application; otherwise Celery makes one up that leads nowhere."""
    if find_spec("celery") is None:
        return False
    from celery import current_app

    return bool(current_app.main != "default" or current_app.conf.task_always_eager)
