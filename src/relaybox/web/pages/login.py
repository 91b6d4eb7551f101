"""``/login``: the form. Who they are is decided where sessions are made."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.templating import back, page


def login_form(request: Request, status: int = 200, wrong: str = "", next: str | None = None) -> Response:
    """The form, with what was wrong the last time."""
    after = back(next if next is not None else request.query_params.get("next"), "/")
    return page(request, "login.html", status, wrong=wrong, next=after)


async def login(request: Request) -> Response:
    """The empty form."""
    return login_form(request)
