"""Celery's eager mode, and other functions in the place of the shop's handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relaybox.contrib.django.configuration import forget
from relaybox.contrib.django.handlers import registered
from tests.django.project.celery import app


@contextmanager
def eager(*, propagates: bool = False) -> Iterator[None]:
    """Tasks run where they are called, as many projects have it in their tests."""
    before = app.conf.task_always_eager, app.conf.task_eager_propagates
    app.conf.task_always_eager, app.conf.task_eager_propagates = True, propagates
    try:
        yield
    finally:
        app.conf.task_always_eager, app.conf.task_eager_propagates = before


@contextmanager
def handled_by(function: Callable[..., Any], name: str = "memory") -> Iterator[None]:
    """The function takes what goes to this handler of the shop."""
    before = registered[name]
    registered[name] = before._replace(function=function)
    forget()
    try:
        yield
    finally:
        registered[name] = before
        forget()
