"""Private names of Django and asgiref, used only here. Tests say what to do when a release breaks one.

Tried with Django 4.2.30, 5.2.19 and 6.1.3 and asgiref 3.13.0. See ``tests/django/test_private.py``.
"""

from __future__ import annotations

import sys
from asyncio import AbstractEventLoop
from typing import Any, TextIO

from asgiref.sync import AsyncToSync
from django.core.management.base import BaseCommand, OutputWrapper
from django.db.transaction import Atomic


def waiting_thread(loop: AbstractEventLoop) -> Any:
    """Return the executor that runs calls in the thread waiting in ``async_to_sync`` for this loop."""
    return getattr(AsyncToSync.executors, "current", None) or AsyncToSync.loop_thread_executors[loop]


def is_of_testcase(block: Atomic) -> bool:
    """True if a ``TestCase`` opened the block around its tests."""
    return bool(block._from_testcase)


def in_tests() -> bool:
    """True if Django's test environment is set up."""
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


def alias_of(queryset: Any) -> str | None:
    """Return the alias set with ``using()``, or None if routers choose."""
    alias: str | None = queryset._db
    return alias


def read_for_writing(queryset: Any) -> None:
    """Make routers choose the QuerySet's database as for a write."""
    queryset._for_write = True


def chosen_fields(queryset: Any) -> tuple[str, ...]:
    """Return the fields named in ``values()``, or an empty tuple."""
    return queryset._fields or ()


def gives(queryset: Any) -> type:
    """Return the class that turns a QuerySet's rows into models, dicts or tuples."""
    kind: type = queryset._iterable_class
    return kind


def is_typed(command: BaseCommand) -> bool:
    """True if the command was typed, not called from Python."""
    return bool(command._called_from_command_line)


def stream_of(output: OutputWrapper) -> TextIO:
    """Return the stream behind a command's ``stdout`` or ``stderr``."""
    stream: TextIO = output._out
    return stream


def redirect_from_missing(admin: Any, request: Any, object_id: str) -> Any:
    """Return the admin's redirect for a row that does not exist."""
    return admin._get_obj_does_not_exist_redirect(request, admin.opts, object_id)
