"""The dashboard's pages, one a module, and where they are."""

from __future__ import annotations

from relaybox.web.live import live
from relaybox.web.pages.actions import ACTIONS, confirm
from relaybox.web.pages.audit import audit
from relaybox.web.pages.dead_letters import dead_letters
from relaybox.web.pages.destinations import destination, destinations
from relaybox.web.pages.event import event
from relaybox.web.pages.events import events
from relaybox.web.pages.failures import failures
from relaybox.web.pages.login import login
from relaybox.web.pages.operations import operations
from relaybox.web.pages.overview import overview
from relaybox.web.pages.relays import relays
from relaybox.web.pages.static import static
from relaybox.web.pages.system import system
from relaybox.web.route import Route

PAGES = (
    Route("GET", "/", overview, "viewer", "page"),
    Route("GET", "/destinations", destinations, "viewer", "page"),
    Route("GET", "/destinations/{name}", destination, "viewer", "page"),
    Route("GET", "/events", events, "viewer", "page"),
    Route("GET", "/events/{id}", event, "viewer", "page"),
    Route("GET", "/failures", failures, "viewer", "page"),
    Route("GET", "/dead-letters", dead_letters, "viewer", "page"),
    Route("GET", "/operations", operations, "viewer", "page"),
    Route("GET", "/relays", relays, "viewer", "page"),
    Route("GET", "/audit", audit, "viewer", "page"),
    Route("GET", "/system", system, "viewer", "page"),
    Route("GET", "/actions/confirm", confirm, "operator", "page"),
    *(Route("POST", f"/actions/{name}", endpoint, "operator", "page") for name, endpoint in ACTIONS.items()),
    Route("GET", "/live", live, "viewer", "page", media_type="text/event-stream"),
    Route("GET", "/login", login, None, "page"),
    Route("GET", "/static/{file}", static, None, "page"),
)
