"""``/relays``: who delivers."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from relaybox.operate.why import is_alive
from relaybox.stores.ledger import Relay
from relaybox.web.show import plural
from relaybox.web.templating import page


@dataclass(frozen=True, slots=True)
class _Shown:
    relay: Relay
    alive: bool
    leads: bool


async def relays(request: Request) -> Response:
    """The relays that were seen lately, and which of them leads."""
    seen = (await request.state.admin.stats()).relays
    shown = [
        _Shown(one, is_alive(one), one.leads_until is not None and one.leads_until > one.seen_at)
        for one in seen
    ]
    spoken = f"{plural(sum(one.alive for one in shown), 'relay')} alive"
    return page(request, "relays.html", relays=shown, spoken=spoken)
