"""The HTTP API and the dashboard, as ASGI applications to serve or to mount under any prefix.

from relaybox.web import api, dashboard

app.mount("/outbox", dashboard(outbox))
app.mount("/api/v2/admin/outbox", api(outbox))
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from relaybox.errors import MissingExtra

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.web.app import Web

__all__ = ["api", "dashboard"]


def dashboard(outbox: Outbox, **settings: Any) -> Web:
    """Return the pages, the API under ``/api``, ``/metrics``, ``/livez`` and ``/readyz`` in one application.

    ``settings`` override those of the ``[web]`` table.
    """
    return _make(outbox, ("api", "open", "page"), settings)


def api(outbox: Outbox, **settings: Any) -> Web:
    """Return the API without pages; it answers at ``…/stats`` as well as ``…/api/stats``."""
    return _make(outbox, ("api", "open"), settings)


def _make(outbox: Outbox, kinds: Collection[str], settings: dict[str, Any]) -> Web:
    """Return an application with the routes of these kinds; raise ``MissingExtra`` before importing it."""
    for package in ("starlette", "jinja2"):
        if find_spec(package) is None:
            raise MissingExtra(package, "web")
    from relaybox.web.app import Web
    from relaybox.web.routes import ROUTES
    from relaybox.web.settings import WebSettings

    served = [route for route in ROUTES if route.kind in kinds]
    return Web(outbox, WebSettings.of(outbox.settings.web, **settings), served)
