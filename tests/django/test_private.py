"""The private attributes of Django and asgiref that the app uses: that they are there, and what to do if not.

A failure's note says what the attribute is for. Look up what took its place in the release that broke it,
keep the former for the releases that have it, and add the version to ``private``.
"""

from __future__ import annotations

import ast
import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin import site
from django.core.management.base import BaseCommand, OutputWrapper
from django.db import connections, transaction
from django.db.models.query import ModelIterable, ValuesIterable, ValuesListIterable
from django.test import RequestFactory

from relaybox.contrib.django import private
from relaybox.contrib.django.models import OutboxEvent

DOCUMENTED = {"_meta", "_base_manager", "_default_manager"}
OWN = {"_only", "_register", "_using", "_reader", "_outbox", "_get_running_loop", "_set_running_loop"}
"""Of classes of ours, and of asyncio, where it is public in spite of its name."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Say in a failure what an attribute is for."""
    try:
        yield
    except Exception as error:
        error.add_note(f"needed: {purpose}; see the top of {__name__}")
        raise


def test_private_attributes_of_others_stand_in_one_module() -> None:
    home = Path(private.__file__)
    found = {
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in home.parent.rglob("*.py")
        if path != home
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
        and node.attr not in DOCUMENTED | OWN
    }
    assert found == set()


def test_asgiref_says_which_thread_waits_for_a_loop() -> None:
    async def look() -> object:
        return private.waiting_thread(asyncio.get_running_loop())

    with needed_for("a time limit that interrupts a drain has its work end first (store._Entered)"):
        assert callable(async_to_sync(look)().run_until_future)


@pytest.mark.django_db
def test_django_says_which_transaction_is_a_tests() -> None:
    with needed_for("drains deliver inside a TestCase, and not inside an open atomic() (store.is_busy)"):
        [*_, outer] = connections["default"].atomic_blocks
        assert private.is_of_testcase(outer)
        with transaction.atomic():
            assert not private.is_of_testcase(connections["default"].atomic_blocks[-1])


def test_django_says_that_tests_run() -> None:
    from django.test import utils

    with needed_for("commits wake no relay in tests (conf.OutboxSettings.rings)"):
        assert private.in_tests()
        with mock.patch.object(utils, "_TestState", object()):
            assert not private.in_tests()


def test_a_queryset_says_what_was_asked_of_it() -> None:
    rows = OutboxEvent.objects.all()
    with needed_for("a QuerySet is checked before its rows are paged by id (search.QuerySetRows)"):
        assert private.alias_of(rows) is None
        assert private.alias_of(rows.using("sqlite")) == "sqlite"
        assert private.chosen_fields(rows) == private.chosen_fields(rows.values()) == ()
        assert private.chosen_fields(rows.values("id", "position")) == ("id", "position")
        kinds = [private.gives(one) for one in (rows, rows.values("id"), rows.values_list("id"))]
        assert kinds == [ModelIterable, ValuesIterable, ValuesListIterable]


def test_a_queryset_is_read_where_it_would_be_written() -> None:
    rows = OutboxEvent.objects.all()
    with (
        needed_for("retry() reads and changes one and the same database (models.OutboxEventQuerySet)"),
        mock.patch("django.db.router.db_for_write", return_value="sqlite"),
    ):
        private.read_for_writing(rows)
        assert rows.db == rows.failed().db == "sqlite"


def test_a_command_says_who_called_it_and_where_it_writes() -> None:
    stream = io.StringIO()
    with needed_for("call_command() gets what the command line prints (management.commands.outbox)"):
        assert private.stream_of(OutputWrapper(stream)) is stream
        assert not private.is_typed(BaseCommand())


@pytest.mark.django_db
def test_the_admin_has_an_answer_for_what_does_not_exist() -> None:
    admin, request = site._registry[OutboxEvent], RequestFactory().get("/")
    with (
        needed_for("the address of a removed delivery leads to the index (admin.change_view)"),
        mock.patch.object(admin, "message_user"),
    ):
        assert private.redirect_from_missing(admin, request, "gone").status_code == 302
