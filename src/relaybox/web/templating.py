"""Render pages from templates, redirect between them, and serve static files."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relaybox.core import text
from relaybox.operate.documents import counted
from relaybox.web.security import keep_form_token, prefix, set_cookie

FRAGMENT = "x-relaybox-fragment"
"""The header that asks for a page without its layout, to update an open page."""

FLASH = "relaybox_flash"
"""The cookie that carries a message to the next page."""

LONGEST_FLASH = 1_400
"""Bytes of a message: with its escapes, the cookie must fit into 4 KiB."""

STATIC = Path(__file__).parent / "static"
TYPES = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

FILTERS = ("number", "duration", "lag", "rate", "spelled", "machine", "shortened")

SECTIONS = ("destinations", "events", "failures", "dead-letters", "operations", "relays", "audit", "system")
NAVIGATION = (
    ("/", "Overview"),
    *((f"/{name}", name.replace("-", " ").capitalize()) for name in SECTIONS),
)


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Render a template, in its layout unless only a fragment was requested."""
    whole = FRAGMENT not in request.headers
    flash = read_flash(request) if whole else None
    about = {**_about(request), "layout": "base.html" if whole else "fragment.html", "flash": flash}
    body = _environment().get_template(template).render({**about, **context})
    response = HTMLResponse(body, status, headers={"cache-control": "no-store"})
    keep_form_token(request, response)
    if flash is not None:
        response.delete_cookie(FLASH, path=prefix(request) or "/")
    return response


def error_page(request: Request, status: int, title: str, detail: str) -> Response:
    """Return the error page."""
    return page(request, "error.html", status, title=title, detail=detail, code=status)


def redirect(request: Request, path: str, message: str, kind: str = "done") -> RedirectResponse:
    """Redirect to a page that shows a message once; ``kind`` is ``done`` or ``trouble``."""
    response = RedirectResponse(prefix(request) + path, 303)
    shown = text.printable(message, " ").encode("utf-8", "replace")
    flash = json.dumps([kind, shown[:LONGEST_FLASH].decode("utf-8", "ignore")], ensure_ascii=False).encode()
    set_cookie(request, response, FLASH, base64.urlsafe_b64encode(flash).decode(), 60)
    return response


def read_flash(request: Request) -> tuple[str, str] | None:
    """Return the kind and text of the last action's message, if any."""
    try:
        kind, said = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH, "")))
    except (ValueError, TypeError, RecursionError):
        return None
    return (kind, said[:LONGEST_FLASH]) if kind in ("done", "trouble") and isinstance(said, str) else None


def back(given: str | None, otherwise: str) -> str:
    """Return the path to go back to if it is on this site, else ``otherwise``."""
    if given and given.startswith("/") and not given.startswith("//") and given.isprintable():
        return given if "\\" not in given else otherwise
    return otherwise


def here(request: Request) -> str:
    """Return the raw path of the request, without the mount prefix."""
    path: str = request.scope["raw_path"].decode("ascii", "replace")
    return path.removeprefix(quote(prefix(request))) or "/"


def place(request: Request) -> str:
    """Return the path of the request with its query."""
    return here(request) + (f"?{request.url.query}" if request.url.query else "")


def url_of(request: Request) -> Callable[..., str]:
    """Return a function that makes URLs, with the mount prefix and non-empty parameters."""

    def url(path: str, **query: Any) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return prefix(request) + path + (f"?{urlencode(given)}" if given else "")

    return url


def paging(
    request: Request, path: str, cursor: object | None, following: object | None, **given: Any
) -> dict[str, Any]:
    """Return the URL of the next page, and that of the first unless this is it."""
    url = url_of(request)
    return {
        "cursor": cursor,
        "next": None if following is None else url(path, **given, cursor=following),
        "newest": None if cursor is None else url(path, **given),
    }


def _about(request: Request) -> dict[str, Any]:
    user = getattr(request.state, "user", None)
    theme, zone = (request.cookies.get(f"relaybox_{name}", "") for name in ("theme", "zone"))
    return {
        "url": url_of(request),
        "user": user,
        "operator": user is not None and user.role == "operator",
        "csrf": getattr(request.state, "csrf", ""),
        "now": datetime.now(UTC),
        "here": here(request),
        "place": place(request),
        "theme": theme if theme in ("light", "dark") else "",
        "zone": zone if zone in ("utc", "local") else "utc",
        "navigation": NAVIGATION,
        "scrub": request.app.rules.scrub,
    }


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("relaybox.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {name: getattr(text, name) for name in FILTERS}
    environment.filters.update(filters, segment=partial(quote, safe=""))
    environment.globals.update(
        ago=text.distance, counted=counted, plural=text.plural, version_of=version_of, nothing=text.NOTHING
    )
    return environment


@functools.cache
def version_of(name: str) -> str:
    """Return a hash of a static file, so that browsers can cache it forever."""
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]


async def static(request: Request) -> Response:
    """Serve a static file; cacheable forever if its URL has the current version."""
    name = request.path_params["file"]
    if name not in TYPES:
        return error_page(request, 404, "No such file", "Only the dashboard's own files are served here.")
    known = request.query_params.get("v") == version_of(name)
    keep = "public, max-age=31536000, immutable" if known else "no-cache"
    headers = {"cache-control": keep, "etag": f'"{version_of(name)}"', "content-type": TYPES[name]}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response((STATIC / name).read_bytes(), headers=headers)
