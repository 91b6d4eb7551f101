"""What a route is, and how a path finds its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from relaybox.web.problems import Problem
from relaybox.web.schemas import Nothing
from relaybox.web.settings import Role

Kind: TypeAlias = Literal["api", "page", "open"]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One thing that is served.

    ``role`` is what the caller must have; None: anybody may ask. ``kind``: an ``api`` route is given its
    parameters as ``request.state.query`` and its body as ``request.state.body``, read as these types, and
    answers with a document; a ``page`` that is posted to is given ``request.state.form``, with its token
    checked; an ``open`` route is what watches over the process, by any name of the host.
    """

    method: Literal["GET", "POST"]
    path: str
    endpoint: Endpoint
    role: Role | None
    kind: Kind
    query: type[msgspec.Struct] = Nothing
    body: type[msgspec.Struct] = Nothing
    answer: Any = None
    status: int = 200
    media_type: str = "application/json"

    @property
    def summary(self) -> str:
        """The first line of the endpoint's own words."""
        return (self.endpoint.__doc__ or "").strip().partition("\n")[0]

    @property
    def segments(self) -> tuple[str, ...]:
        """The parts of its path."""
        return tuple(self.path.strip("/").split("/"))


@dataclass(frozen=True, slots=True)
class Found:
    """The route of a request, if any, what its path holds, and the methods that the path takes."""

    route: Route | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()


class Table:
    """All routes of an application."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)

    def find(self, method: str, segments: Sequence[str], *, html: bool) -> Found:
        """The route for a path; one that is not asked for as a page leads to the API's of the same path."""
        places = [segments, ("api", *segments)]
        own, twin = (self._at(method, place) for place in places)
        leads_on = own.route is None or (own.route.kind == "page" and not html)
        chosen = twin if leads_on and twin.route is not None else own
        allow = sorted({*own.allow, *twin.allow})
        return Found(chosen.route, chosen.params, tuple(allow))

    def _at(self, method: str, segments: Sequence[str]) -> Found:
        allow: set[str] = set()
        found: Found | None = None
        for route in self.routes:
            params = _matched(route.segments, segments)
            if params is None:
                continue
            allow |= {"GET", "HEAD", "OPTIONS"} if route.method == "GET" else {"POST", "OPTIONS"}
            if found is None and route.method == ("GET" if method == "HEAD" else method):
                found = Found(route, params)
        return replace(found or Found(), allow=tuple(allow))


def _matched(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    params = {}
    for part, given in zip(pattern, segments, strict=True):
        if part.startswith("{") and given:
            params[part[1:-1]] = given
        elif part != given:
            return None
    return params


def segments_of(scope: Scope) -> tuple[str, ...]:
    """The parts of a path behind the prefix that all of this is mounted under, each decoded by itself.

    A slash in a name is ``%2F`` in the address, which the decoded path does not tell from any other slash.
    """
    root = str(scope.get("root_path", "")).rstrip("/")
    raw = scope.get("raw_path")
    path = str(scope["path"])
    inside = path == root or path.startswith(f"{root}/")
    parts = raw.split(b"?")[0].split(b"/") if raw else path.encode("utf-8", "surrogateescape").split(b"/")
    # The first part is what stands before the first slash: nothing.
    own = parts[1 + root.count("/") :] if inside else parts[1:]
    if len(own) > 1 and own[-1] == b"":
        own.pop()
    try:
        return tuple(
            unquote_to_bytes(part).decode("utf-8") if raw else part.decode("utf-8") for part in own
        ) or ("",)
    except UnicodeDecodeError:
        raise Problem(400, "The path is not in UTF-8.") from None
