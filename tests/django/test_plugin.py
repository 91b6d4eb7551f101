"""The fixture ``outbox`` under pytest-django, here and in small projects of users."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.test.testcases import DatabaseOperationForbidden

from relaybox import Event
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.testing import DjangoProbe
from relaybox.errors import SchemaError
from tests.databases import KINDS
from tests.django.conftest import ALIASES
from tests.django.databases import database
from tests.django.steps import orders, place

pytestmark = [pytest.mark.processes, pytest.mark.full]

pytest_plugins = ["pytester"]


def use(outbox: DjangoProbe, using: str, received: list[Event]) -> None:
    """Use everything that the fixture can do."""
    with transaction.atomic(using=using):
        emit_event("order", 1, "order.placed", {"total": 42}, using=using, headers={"by": "100%"})
        emit_event("file", 7, "file.stored", {"name": "a"}, using=using)
        outbox.assert_emitted("order.placed", aggregate_id=1, payload={"total": 42}, headers={"by": "100%"})
    outbox.refute_emitted("order.paid")
    outbox.fail_next("runner", 503)
    drained = outbox.drain()
    assert (drained.delivered, drained.retried) == (1, 1)
    assert [event.payload for event in received] == [{"total": 42}]
    assert outbox.drain(ignore_backoff=True).delivered == 1
    assert [event.payload for event in outbox.sent("runner")] == [{"name": "a"}]
    memory = outbox.capture("memory")
    place(using, 2)
    outbox.drain()
    assert (len(memory.events), len(received)) == (1, 1)
    for event in outbox.assert_emitted("order.placed", count=2):
        assert event.statuses == {"memory": "delivered"}
    outbox.clear()
    assert not OutboxEvent.objects.using(using).exists()


def test_everything_works_in_the_transaction_of_a_test(
    outbox: DjangoProbe, using: str, received: list[Event]
) -> None:
    use(outbox, using, received)


@pytest.mark.django_db(transaction=True)
def test_everything_works_with_real_commits(outbox: DjangoProbe, using: str, received: list[Event]) -> None:
    use(outbox, using, received)


@pytest.mark.django_db(transaction=True)
async def test_an_asynchronous_test_delivers(
    outbox: DjangoProbe, using: str, received: list[Event], tidy: None
) -> None:
    await sync_to_async(place)(using)
    await outbox.aassert_emitted("order.placed", aggregate_id=1)
    outbox.fail_next("memory", 503)
    assert (await outbox.adrain()).retried == 1
    assert (await outbox.adrain(ignore_backoff=True)).delivered == 1
    assert len(received) == 1
    await outbox.aclear()
    await outbox.arefute_emitted()


@pytest.mark.django_db(databases=ALIASES)
def test_another_database_is_looked_at_by_its_alias(outbox: DjangoProbe, received: list[Event]) -> None:
    for number, alias in enumerate(ALIASES, 1):
        emit_event("order", number, "order.placed", {}, using=alias)
        emit_event("file", number, "file.stored", {}, using=alias)
    outbox.fail_next("runner", 503)
    for number, alias in enumerate(ALIASES, 1):
        other = outbox.using(alias)
        other.assert_emitted("order.placed", aggregate_id=number, count=1)
        drained = other.drain()
        assert (drained.delivered, drained.retried) == ((1, 1) if number == 1 else (2, 0))
    assert [event.aggregate_id for event in outbox.sent("runner")] == ["2", "3"]
    outbox.assert_emitted("order.placed", aggregate_id=1, count=1)


@pytest.mark.django_db(databases=["default"])
def test_a_database_that_the_test_may_not_use_is_refused_in_djangos_words(outbox: DjangoProbe) -> None:
    for probe in (outbox.using, DjangoProbe):
        with pytest.raises(DatabaseOperationForbidden, match="'sqlite'"):
            probe("sqlite")


# A change of a table commits on MariaDB, so that nothing is left to be spared.
@pytest.mark.parametrize("using", ["default", "sqlite"], indirect=True)
def test_an_error_leaves_the_transaction_usable(outbox: DjangoProbe, using: str) -> None:
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_event RENAME TO outbox_moved")
        with pytest.raises(SchemaError):
            outbox.assert_emitted()
        assert DjangoProbe(using)
        cursor.execute("ALTER TABLE outbox_moved RENAME TO outbox_event")
    orders(using).create(total=1)
    outbox.refute_emitted()


SETTINGS = """
SECRET_KEY = "x"
DATABASES = {{"default": {default!r}}}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "relaybox.contrib.django", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
OUTBOX = {{
    "DESTINATIONS": {{"runner": {{"sink": "http://127.0.0.1:9/events", "allow": ["127.0.0.0/8"]}}}},
    "ROUTES": {{"file.*": ["runner"]}},
}}
"""

HANDLERS = """
from django.contrib.auth.models import Group
from relaybox.contrib.django import outbox_handler

@outbox_handler("order.placed", name="groups")
def remember(event):
    Group.objects.create(name=event.aggregate_id)
"""

PASSING = """
import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import TestCase, TransactionTestCase
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.models import OutboxEvent

def place(number):
    with transaction.atomic():
        emit_event("order", number, "order.placed", {"total": 42})
        emit_event("file", number, "file.stored", {})

def check(outbox, number):
    assert not OutboxEvent.objects.exists()
    place(number)
    outbox.assert_emitted("order.placed", aggregate_id=number, payload={"total": 42})
    outbox.fail_next("runner", 503)
    assert (outbox.drain().retried, outbox.drain(ignore_backoff=True).delivered) == (1, 1)
    assert Group.objects.get().name == str(number)
    assert len(outbox.sent("runner")) == 1

@pytest.mark.django_db
def test_marked(outbox):
    check(outbox, 1)

def test_outbox_before_db(outbox, db):
    check(outbox, 2)

def test_outbox_before_transactional_db(outbox, transactional_db):
    check(outbox, 3)

@pytest.mark.django_db(transaction=True)
def test_committing(outbox, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DISPATCH": "none"}
    check(outbox, 4)

@pytest.mark.django_db
def test_callbacks(outbox, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        place(5)
    outbox.assert_emitted(count=2)

@pytest.mark.django_db
def test_the_projects_own(outbox, relaybox_outbox):
    from relaybox.contrib.django.outbox import get_outbox
    assert relaybox_outbox is get_outbox()

@pytest.mark.relaybox_real("runner")
def test_for_real(outbox, db):
    place(6)
    drained = outbox.drain()
    assert (drained.delivered, drained.retried) == (1, 1)
    assert "127.0.0.1:9" in drained.held["runner"]

class TestInAClass(TestCase):
    @pytest.fixture(autouse=True)
    def _outbox(self, outbox):
        self.outbox = outbox

    def test_it(self):
        check(self.outbox, 7)

def test_without_the_outbox():
    assert True
"""

REFUSED = """
import pytest

def test_no_access(outbox):
    outbox.refute_emitted()

@pytest.mark.django_db
def test_access(outbox):
    outbox.assert_emitted("order.placed")
"""


MEMORY = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


@pytest.fixture(params=[*KINDS, "memory"])
def project(
    request: pytest.FixtureRequest, pytester: pytest.Pytester, fresh_database: Callable[[str], str]
) -> pytest.Pytester:
    """Make a small project; on SQLite once in a file and once in memory, as most projects are tested."""
    return made(pytester, database(fresh_database(request.param)) if request.param != "memory" else MEMORY)


def made(pytester: pytest.Pytester, default: dict[str, object]) -> pytest.Pytester:
    pytester.mkpydir("shop")
    (pytester.path / "shop" / "outbox_handlers.py").write_text(HANDLERS)
    pytester.makepyfile(settings=SETTINGS.format(default=default))
    return pytester


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    strict = ("-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--strict-config")
    settings = ("-o", "pythonpath=.", "--ds=settings", "-o", "asyncio_default_fixture_loop_scope=function")
    return pytester.runpytest_subprocess(*strict, *settings, *options, timeout=120)


def test_a_project_uses_the_fixture_without_configuration(project: pytest.Pytester) -> None:
    project.makepyfile(PASSING)
    run(project).assert_outcomes(passed=9)


def test_a_test_without_access_to_the_database_gets_an_error_that_says_so(pytester: pytest.Pytester) -> None:
    made(pytester, MEMORY)
    pytester.makepyfile(REFUSED)
    result = run(pytester)
    result.assert_outcomes(errors=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * relaybox: the fixture outbox reads the database, *mark it with @pytest.mark.django_db*",
            "E * no event was emitted that is: order.placed",
            "E * nothing was emitted on 'default' since the test began",
        ]
    )
    result.stdout.no_fnmatch_line("*testing/probe.py*")


@pytest.mark.fast
def test_the_tests_of_the_document_pass(pytester: pytest.Pytester) -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/test.md").read_text()
    blocks = re.findall(r"^```python django\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    views, handlers, functions, classes = blocks
    made(pytester, MEMORY)
    settings = pytester.path / "settings.py"
    settings.write_text(settings.read_text().replace("runner", "search").replace("file.*", "order.*"))
    (pytester.path / "shop" / "orders.py").write_text(views)
    (pytester.path / "shop" / "outbox_handlers.py").write_text(handlers)
    pytester.makepyfile(test_functions=functions, test_classes=classes)
    run(pytester).assert_outcomes(passed=3)
