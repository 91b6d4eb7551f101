"""The HTTP API and the dashboard, as ASGI applications to be served or mounted under any prefix.

from relaybox.web import api, dashboard

app.mount("/outbox", dashboard(outbox))
app.mount("/api/v2/admin/outbox", api(outbox))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaybox.errors import MissingExtra

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.web.app import Web

__all__ = ["api", "dashboard"]


def dashboard(outbox: Outbox, **settings: Any) -> Web:
    """Everything: the pages, the API under ``/api``, ``/metrics``, ``/livez`` and ``/readyz``.

    ``settings`` are those of the ``[web]`` table, and go before the outbox's own.
    """
    _check_extra()
    from relaybox.web.app import make
    from relaybox.web.pages.error import error
    from relaybox.web.pages.login import login_form
    from relaybox.web.routes import ROUTES

    return make(outbox, ROUTES, settings, error_page=error, login_form=login_form)


def api(outbox: Outbox, **settings: Any) -> Web:
    """The API alone, for a prefix of the application's: ``…/stats`` as well as ``…/api/stats``."""
    _check_extra()
    from relaybox.web.app import make
    from relaybox.web.routes import ROUTES

    return make(outbox, (route for route in ROUTES if route.kind != "page"), settings)


def _check_extra() -> None:
    """Say what to install, before anything is imported that needs it."""
    from importlib.util import find_spec

    for package in ("starlette", "jinja2"):
        if find_spec(package) is None:
            raise MissingExtra(package, "web")
