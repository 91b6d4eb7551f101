"""The pytest plugin: the fixture ``outbox``.

Every project's pytest loads this file where Relaybox is installed, so it imports nothing of weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relaybox.app import Outbox
    from relaybox.testing.probe import OutboxProbe

MARKER = (
    "relaybox_real(*destinations): deliver to these destinations (without names: to all) for real,"
    " instead of capturing in memory what would be sent"
)
FIX = (
    'write `relaybox_app = "package.module:name"` into the settings of pytest, or a fixture `relaybox_outbox`'
    " that returns your Outbox"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The settings."""
    parser.addini("relaybox_app", "where your Outbox is, as package.module:name", default="")
    parser.addini("relaybox_real", "deliver for real in every test", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def relaybox_outbox(pytestconfig: pytest.Config) -> Outbox:
    """The Outbox under test: the one that ``relaybox_app`` names, unless you override this fixture."""
    return named_outbox(str(pytestconfig.getini("relaybox_app")))


@pytest.fixture
def outbox(request: pytest.FixtureRequest, relaybox_outbox: Outbox) -> Iterator[OutboxProbe]:
    """Your outbox for one test: ``assert_emitted``, ``refute_emitted``, ``drain``, ``fail_next`` and more."""
    from relaybox.testing.probe import OutboxProbe

    probe = OutboxProbe(_checked(relaybox_outbox, "the fixture relaybox_outbox"), _real(request))
    with probe.installed():
        yield probe


def named_outbox(path: str) -> Outbox:
    """The Outbox at ``package.module:name``."""
    if not path:
        raise pytest.UsageError(f"relaybox: no Outbox to test with: {FIX}")
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"relaybox_app = {path!r}: {error}; {FIX}") from error
    return _checked(found, f"relaybox_app = {path!r}")


def _real(request: pytest.FixtureRequest) -> tuple[str, ...] | None:
    """The destinations that keep their own sinks; ``None`` for all."""
    markers = list(request.node.iter_markers("relaybox_real"))
    if request.config.getini("relaybox_real") or any(not marker.args for marker in markers):
        return None
    return tuple(name for marker in markers for name in marker.args)


def _checked(found: Any, where: str) -> Outbox:
    from relaybox.app import Outbox

    if not isinstance(found, Outbox):
        raise pytest.UsageError(f"{where}: it is of type {type(found).__name__}, not an Outbox; {FIX}")
    return found
