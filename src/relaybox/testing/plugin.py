"""The pytest plugin. pytest loads it in every project with Relaybox installed, so it must import quickly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.testing.probe import OutboxProbe

MARKER = (
    "relaybox_real(*destinations): deliver to these destinations (without names: to all) for real,"
    " instead of capturing in memory what would be sent"
)
FIX = (
    'write `relaybox_app = "package.module:name"` into the settings of pytest, or a fixture `relaybox_outbox`'
    " that returns your Outbox"
)
DJANGO_APP = "relaybox.contrib.django"
DATABASE_FIXTURES = "db transactional_db django_db_reset_sequences django_db_serialized_rollback live_server"
"""Fixtures of pytest-django; a test that requests one of them may use the database."""

BLOCKED = "Database access not allowed"
"""pytest-django's message to a test that may not use the database."""

NO_DATABASE = (
    "the fixture outbox reads the database, which this test may not use: mark it with @pytest.mark.django_db,"
    " or let it ask for the fixture db or transactional_db"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("relaybox_app", "where your Outbox is, as package.module:name", default="")
    parser.addini("relaybox_real", "deliver for real in every test", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def relaybox_outbox(request: pytest.FixtureRequest) -> Outbox:
    """The Outbox under test, unless you override this fixture: the one that ``relaybox_app`` names, else that
    of the Django project.
    """
    path = str(request.config.getini("relaybox_app"))
    return named_outbox(path) if path or not _in_django() else _project_outbox(request)


@pytest.fixture
def outbox(request: pytest.FixtureRequest, relaybox_outbox: Outbox) -> Iterator[OutboxProbe]:
    """Your outbox for one test: ``assert_emitted``, ``refute_emitted``, ``drain``, ``fail_next`` and more."""
    from relaybox.testing.probe import OutboxProbe

    checked = _checked(relaybox_outbox, "the fixture relaybox_outbox")
    using, real = getattr(checked, "using", None), _real(request)
    probe = OutboxProbe(checked, real) if using is None else _django_probe(request, using, real)
    with probe.installed():
        yield probe


def named_outbox(path: str) -> Outbox:
    """Return the Outbox at ``package.module:name``."""
    if not path:
        raise pytest.UsageError(f"relaybox: no Outbox to test with: {FIX}")
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"relaybox_app = {path!r}: {error}; {FIX}") from error
    return _checked(found, f"relaybox_app = {path!r}")


def _in_django() -> bool:
    registry = sys.modules.get("django.apps")
    return registry is not None and registry.apps.ready and registry.apps.is_installed(DJANGO_APP)


def _project_outbox(request: pytest.FixtureRequest) -> Outbox:
    from relaybox.contrib.django.emit import default_alias
    from relaybox.contrib.django.outbox import get_outbox

    if request.config.pluginmanager.hasplugin("django"):
        # Before this, the settings name the real databases, not the test databases.
        request.getfixturevalue("django_db_setup")
    return get_outbox(default_alias())


def _django_probe(request: pytest.FixtureRequest, using: str, real: tuple[str, ...] | None) -> OutboxProbe:
    from relaybox.contrib.django.emit import default_alias
    from relaybox.contrib.django.testing import DjangoProbe

    if request.config.pluginmanager.hasplugin("django"):
        for name in DATABASE_FIXTURES.split():
            if name in request.fixturenames:
                request.getfixturevalue(name)
    try:
        return DjangoProbe(None if using == default_alias() else using, real)
    except RuntimeError as error:
        if BLOCKED not in str(error):
            raise
        raise pytest.UsageError(f"relaybox: {NO_DATABASE}") from None


def _real(request: pytest.FixtureRequest) -> tuple[str, ...] | None:
    markers = list(request.node.iter_markers("relaybox_real"))
    if request.config.getini("relaybox_real") or any(not marker.args for marker in markers):
        return None
    return tuple(name for marker in markers for name in marker.args)


def _checked(found: Any, where: str) -> Outbox:
    from relaybox.outbox import Outbox

    if not isinstance(found, Outbox):
        raise pytest.UsageError(f"{where}: it is of type {type(found).__name__}, not an Outbox; {FIX}")
    return found
