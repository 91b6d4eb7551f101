"""What goes wrong, as a page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.templating import page


def error(request: Request, status: int, title: str, detail: str) -> Response:
    """A page that says what happened and leads back."""
    return page(request, "error.html", status, title=title, detail=detail, code=status)
