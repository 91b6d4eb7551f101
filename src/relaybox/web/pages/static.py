"""``/static/…``: the style sheet, the script and the icon."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from relaybox.web.pages.error import error
from relaybox.web.templating import STATIC, version_of

TYPES = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


async def static(request: Request) -> Response:
    """One of our own files; its address holds its version, so that it may be kept for good."""
    name = request.path_params["file"]
    if name not in TYPES:
        return error(request, 404, "No such file", "Only the dashboard's own files are served here.")
    known = request.query_params.get("v") == version_of(name)
    keep = "public, max-age=31536000, immutable" if known else "no-cache"
    headers = {"cache-control": keep, "etag": f'"{version_of(name)}"', "content-type": TYPES[name]}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response((STATIC / name).read_bytes(), headers=headers)
