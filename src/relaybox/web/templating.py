"""Pages from templates: what each of them knows, and how one page leads to the next."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relaybox.core.text import plural
from relaybox.operate.documents import counted
from relaybox.web import show
from relaybox.web.security import keep_form_token, prefix, set_cookie

FRAGMENT = "x-relaybox-fragment"
"""The header of a request for a page without its frame, to update what is on the screen."""

FLASH = "relaybox_flash"
"""The cookie that carries a message to the next page."""

LONGEST_FLASH = 1_400
"""Bytes; a cookie of more than four kilobytes, with everything that is escaped in it, is none."""

STATIC = Path(__file__).parent / "static"
TYPES = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The files in it, which are served."""

FILTERS = ("number", "duration", "lag", "rate", "size", "spelled", "machine", "segment", "shortened")
"""What templates take from ``show``."""

SECTIONS = ("destinations", "events", "failures", "dead-letters", "operations", "relays", "audit", "system")
NAVIGATION = (
    ("/", "Overview"),
    *((f"/{name}", name.replace("-", " ").capitalize()) for name in SECTIONS),
)


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """The template as an answer, in its frame unless only a fragment was asked for."""
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
    """A page that says what happened and leads back."""
    return page(request, "error.html", status, title=title, detail=detail, code=status)


def redirect(request: Request, path: str, message: str, kind: str = "done") -> RedirectResponse:
    """To a page, by GET, with a message that it shows once; ``kind`` is ``done`` or ``trouble``."""
    response = RedirectResponse(prefix(request) + path, 303)
    shown = "".join(one if one.isprintable() else " " for one in message).encode("utf-8", "replace")
    cut = shown[:LONGEST_FLASH].decode("utf-8", "ignore")
    text = json.dumps([kind, cut], ensure_ascii=False).encode()
    set_cookie(request, response, FLASH, base64.urlsafe_b64encode(text).decode(), 60)
    return response


def read_flash(request: Request) -> tuple[str, str] | None:
    """The message that the last action left, if any."""
    try:
        kind, text = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH, "")))
    except (ValueError, TypeError, RecursionError):
        return None
    known = kind in ("done", "trouble") and isinstance(text, str)
    return (kind, text[:LONGEST_FLASH]) if known else None


def back(given: str | None, otherwise: str) -> str:
    """A path of this dashboard that a form names to come back to."""
    if given and given.startswith("/") and not given.startswith("//") and given.isprintable():
        return given if "\\" not in given else otherwise
    return otherwise


def here(request: Request) -> str:
    """The path of the request as it was written, without the prefix that all of this is mounted under."""
    path: str = request.scope["raw_path"].decode("ascii", "replace")
    return path.removeprefix(quote(prefix(request))) or "/"


def place(request: Request) -> str:
    """The same, with the query."""
    return here(request) + (f"?{request.url.query}" if request.url.query else "")


def url_of(request: Request) -> Callable[..., str]:
    """Makes addresses of paths: with the prefix, and with the parameters that are given."""

    def url(path: str, **query: Any) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return prefix(request) + path + (f"?{urlencode(given)}" if given else "")

    return url


def paging(
    request: Request, path: str, cursor: object | None, following: object | None, **given: Any
) -> dict[str, Any]:
    """Return where a list goes on, and where it begins unless this is its first page."""
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
    environment.filters.update({name: getattr(show, name) for name in FILTERS})
    environment.globals.update(
        ago=show.ago, counted=counted, plural=plural, version_of=version_of, nothing=show.NOTHING
    )
    return environment


@functools.cache
def version_of(name: str) -> str:
    """Of a static file: changes when the file does, so that browsers may keep it for good."""
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]


async def static(request: Request) -> Response:
    """One of our own files; its address holds its version, so that it may be kept for good."""
    name = request.path_params["file"]
    if name not in TYPES:
        return error_page(request, 404, "No such file", "Only the dashboard's own files are served here.")
    known = request.query_params.get("v") == version_of(name)
    keep = "public, max-age=31536000, immutable" if known else "no-cache"
    headers = {"cache-control": keep, "etag": f'"{version_of(name)}"', "content-type": TYPES[name]}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response((STATIC / name).read_bytes(), headers=headers)
