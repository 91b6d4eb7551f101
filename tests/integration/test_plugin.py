"""The pytest plugin in small projects of its users."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from relaybox.testing.plugin import named_outbox
from tests.databases import sync_url

pytestmark = pytest.mark.full

pytest_plugins = ["pytester"]
Fresh = Callable[[str], str]


def test_pytest_finds_the_plugin_by_itself() -> None:
    [found] = entry_points(group="pytest11", name="relaybox")
    assert found.value == "relaybox.testing.plugin"


def python(script: str) -> str:
    return subprocess.check_output([sys.executable, "-c", script], text=True)


def test_the_plugin_costs_other_projects_nothing() -> None:
    script = "import pytest, sys; before = set(sys.modules); import relaybox.testing.plugin; "
    loaded = python(f"{script}print(*sorted(set(sys.modules) - before))").split()
    assert loaded == ["relaybox", "relaybox.testing", "relaybox.testing.plugin"]


def test_statuses_need_no_http_client() -> None:
    script = "import sys; sys.modules['aiohttp'] = None; from relaybox.testing.probe import failure; "
    assert python(f"{script}print(repr(failure(503)))") == "Unavailable('503 Service Unavailable')\n"


CONFTEST = """
import pytest, sqlalchemy as sa
from relaybox import Destination, Outbox, Route

URL, DRIVER = {url!r}, {driver!r}

@pytest.fixture(scope="session")
def relaybox_outbox():
    outbox = Outbox(URL, destinations=[Destination("search", "http://127.0.0.1:1/", allow=["127.0.0.0/8"])],
                    routes=[Route("*", to="search")])
    outbox.migrate()
    return outbox

@pytest.fixture(scope="session")
def engine():
    engine = sa.create_engine(DRIVER)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    yield engine
    engine.dispose()
"""

PASSING = """
import pytest
from sqlalchemy.orm import Session

def pay(outbox, session, id_=1):
    outbox.emit(session, "Order", id_, "order.paid", {"total": 42})

@pytest.fixture
def session(engine):
    with engine.connect() as connection, connection.begin() as outer:
        yield Session(connection, join_transaction_mode="create_savepoint")
        outer.rollback()

def test_rolled_back(outbox, relaybox_outbox, session):
    pay(relaybox_outbox, session)
    session.commit()
    outbox.assert_emitted("order.paid", aggregate_id=1, session=session)
    if session.bind.dialect.name != "sqlite":
        assert outbox.drain().delivered == 0

def test_committed(outbox, relaybox_outbox, engine):
    with Session(engine) as session, session.begin():
        pay(relaybox_outbox, session)
    outbox.assert_emitted("order.*", payload={"total": 42})
    outbox.fail_next("search", 503)
    assert outbox.drain().retried == 1
    assert outbox.drain(ignore_backoff=True).delivered == 1
    assert [event.type for event in outbox.sent("search")] == ["order.paid"]

def test_nothing(outbox):
    outbox.refute_emitted()

async def test_async(outbox, relaybox_outbox, engine):
    with Session(engine) as session, session.begin():
        pay(relaybox_outbox, session)
    await outbox.aassert_emitted("order.paid")
    assert (await outbox.adrain()).delivered == 1

@pytest.mark.relaybox_real("search")
def test_for_real(outbox, relaybox_outbox, engine):
    with Session(engine) as session, session.begin():
        pay(relaybox_outbox, session)
    drained = outbox.drain()
    assert drained.retried == 1
    assert "cannot connect to 127.0.0.1:1" in drained.held["search"]
    outbox.clear()

@pytest.mark.relaybox_real
async def test_all_for_real(outbox, relaybox_outbox, engine):
    with Session(engine) as session, session.begin():
        pay(relaybox_outbox, session)
    assert (await outbox.adrain()).retried == 1
    await outbox.aclear()

async def test_async_after_synchronous_drains(outbox):
    assert (await outbox.adrain()).delivered == 0
"""

FAILING = """
def test_wrong(outbox, relaybox_outbox, engine):
    with engine.begin() as connection:
        relaybox_outbox.emit(connection, "Order", 2, "order.paid", {"total": 41})
    outbox.assert_emitted("order.paid", aggregate_id=1, payload={"total": 42})

def test_uncommitted(outbox, relaybox_outbox, engine):
    with engine.connect() as connection:
        relaybox_outbox.emit(connection, "Order", 2, "order.paid", {"total": 41})
        outbox.assert_emitted("order.paid")

def test_refuted(outbox, relaybox_outbox, engine):
    with engine.begin() as connection:
        relaybox_outbox.emit(connection, "Order", 2, "order.paid", {"total": 41})
    outbox.refute_emitted("order.*")

def test_not_delivered(outbox):
    outbox.clear()
    assert outbox.drain().delivered == 1
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    strict = ("-p", "no:cacheprovider", "-W", "error", "--strict-markers", "--strict-config")
    asyncio = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    return pytester.runpytest_subprocess(*strict, *asyncio, *options, timeout=120)


@pytest.fixture(params=["postgresql-18", "sqlite"])
def project(
    request: pytest.FixtureRequest, pytester: pytest.Pytester, migrated_database: Fresh
) -> pytest.Pytester:
    url = migrated_database(request.param)
    driver = sync_url(url).render_as_string(hide_password=False)
    pytester.makeconftest(CONFTEST.format(url=url, driver=driver))
    return pytester


def test_a_project_uses_it_with_rollback_commit_and_asynchronously(project: pytest.Pytester) -> None:
    project.makepyfile(PASSING)
    run(project).assert_outcomes(passed=7)
    run(project, "-o", "asyncio_default_test_loop_scope=session").assert_outcomes(passed=7)


def test_failures_are_shown_in_full_and_without_our_frames(project: pytest.Pytester) -> None:
    project.makepyfile(FAILING)
    result = run(project)
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "E * no event was emitted that is: order.paid, aggregate_id=1, payload={'total': 42}",
            "E * near: order.paid of Order 2: its aggregate_id is '2', not '1'; payload?'total'? is 41, *",
            "E * emitted since the test began: 1 event",
            "E * event type  aggregate  destinations  payload",
            'E * order.paid  Order 2    search        {"total": 41}',
            "E * nothing is committed that was emitted since the test began",
            "E * hint: another connection does not see what an open transaction emitted: commit it, or *",
            "E * 1 event emitted that should not be: order.*",
            "E * Drained(delivered=0, * note='nothing committed was due; *commit it first').delivered",
        ]
    )
    result.stdout.no_fnmatch_line("*testing/probe.py*")


def test_the_tests_of_the_document_pass(
    pytester: pytest.Pytester, fresh_database: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/test.md").read_text()
    app, *tests = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("DATABASE_URL", fresh_database("postgresql-18"))
    pytester.makepyfile(shop=app, test_shop="from shop import *\n" + "\n".join(tests))
    run(pytester, "-o", "pythonpath=.", "-o", "relaybox_app=shop:outbox").assert_outcomes(passed=6)


def test_the_app_can_be_named_in_the_settings(pytester: pytest.Pytester, migrated_database: Fresh) -> None:
    pytester.makepyfile(
        myapp=f"import relaybox\noutbox = relaybox.Outbox({migrated_database('sqlite')!r})\n",
        test_it="def test_it(outbox):\n    outbox.refute_emitted()\n",
    )
    run(pytester, "-o", "pythonpath=.", "-o", "relaybox_app=myapp:outbox").assert_outcomes(passed=1)
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E * relaybox: no Outbox to test with: write `relaybox_app = *"])


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("relaybox:nothing", "'relaybox:nothing': module 'relaybox' has no attribute 'nothing'; "),
        ("relaybocks:outbox", "No module named 'relaybocks'; write `relaybox_app ="),
        ("relaybox", "has no attribute ''; write"),
        (":outbox", "Empty module name; write"),
        ("relaybox:Outbox", "it is of type type, not an Outbox; write"),
    ],
)
def test_an_app_that_is_not_there_is_refused(path: str, problem: str) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(problem)):
        named_outbox(path)


def test_the_whole_project_can_be_for_real(pytester: pytest.Pytester, migrated_database: Fresh) -> None:
    pytester.makepyfile(
        myapp=f"""
            from relaybox import Destination, Outbox, Route
            outbox = Outbox({migrated_database("sqlite")!r}, destinations=[Destination("screen", "console:")],
                            routes=[Route("*", to="screen")])
        """,
        test_it="""
            import sqlalchemy as sa
            from myapp import outbox as app

            def test_it(outbox, capsys):
                engine = sa.create_engine(app.settings.database)
                with engine.begin() as connection:
                    app.emit(connection, "Order", 1, "order.paid", {"total": 42})
                engine.dispose()
                assert outbox.drain().delivered == 1
                assert "order.paid" in capsys.readouterr().out
        """,
    )
    options = ("-o", "pythonpath=.", "-o", "relaybox_app=myapp:outbox", "-o", "relaybox_real=true")
    run(pytester, *options).assert_outcomes(passed=1)
