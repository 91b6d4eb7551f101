"""Route × role, from the table itself: every route refuses what it must, however it is asked for."""

from __future__ import annotations

from uuid import uuid4

import httpx2
import pytest

from relaybox.web.login import Attempts
from relaybox.web.routes import API, PAGES, ROUTES, Route
from tests.web.stage import OPERATOR, VIEWER, Stage, bearer, is_problem

NEEDS_A_ROLE = [route for route in ROUTES if route.role is not None]
STREAMS = ("/live",)


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


def address(route: Route) -> str:
    # A row that does not exist: who may ask is decided before that.
    return route.path.replace("{id}", str(uuid4())).replace("{name}", "mail").replace("{file}", "app.css")


async def ask(stage: Stage, route: Route, headers: dict[str, str]) -> httpx2.Response:
    async with stage.client(token=None, headers=headers) as client:
        return await client.request("HEAD" if route.path in STREAMS else route.method, address(route))


STRANGERS = (
    {},
    bearer("token-of-nobody"),
    {"authorization": OPERATOR},
    {"authorization": f"Basic {OPERATOR}"},
    {"cookie": "relaybox_session=e30.e30"},
    {"cookie": f"relaybox_session={OPERATOR}"},
)


async def test_a_stranger_is_not_let_in(quick: Stage, subtests: pytest.Subtests) -> None:
    for route in NEEDS_A_ROLE:
        for headers in STRANGERS:
            with subtests.test(route=named(route), headers=headers):
                # A client with too many wrong passwords gets no answer, which another test shows.
                quick.web.gate.logins, quick.web.gate.bearers = Attempts(), Attempts()
                answer = await ask(quick, route, headers)
                assert answer.status_code == 401, answer.text
                assert answer.headers["www-authenticate"].startswith("Bearer")
    assert not quick.operated.rows()
    assert {action for _, action, *_ in quick.operated.audit()} == {"login refused"}


async def test_a_viewer_changes_nothing(quick: Stage, subtests: pytest.Subtests) -> None:
    for route in ROUTES:
        if route.role == "operator":
            with subtests.test(route=named(route)):
                problem = is_problem(await ask(quick, route, bearer(VIEWER)), 403)
                assert "operator" in problem["detail"]
    assert not quick.operated.audit()


async def test_users_with_the_right_are_let_in(quick: Stage, subtests: pytest.Subtests) -> None:
    for route in NEEDS_A_ROLE:
        if route.method == "GET":
            with subtests.test(route=named(route)):
                token = OPERATOR if route.role == "operator" else VIEWER
                answer = await ask(quick, route, bearer(token))
                # Of an id that does not exist there is nothing; who asks was fine.
                assert answer.status_code in (200, 404, 400), answer.text
                assert answer.status_code != 404 or "{" in route.path


def test_whatever_changes_something_is_for_operators_alone() -> None:
    without = {("POST", "/login"), ("POST", "/logout")}
    changing = [route for route in ROUTES if route.method == "POST"]
    assert len(changing) > 8
    for route in changing:
        assert route.role == "operator" or (route.method, route.path) in without, named(route)


def test_only_these_are_open_to_everybody() -> None:
    free = {named(route) for route in ROUTES if route.role is None}
    assert free == {"GET /livez", "GET /readyz", "POST /login", "GET /login", "GET /static/{file}"}


def test_no_two_routes_are_the_same() -> None:
    names = [named(route) for route in ROUTES]
    assert len(names) == len(set(names))
    assert all(route.kind == "api" for route in API)
    assert all(route.kind == "page" for route in PAGES)


async def test_the_answer_to_a_wrong_method_has_the_right_ones(
    quick: Stage, subtests: pytest.Subtests
) -> None:
    async with quick.client() as client:
        for route in ROUTES:
            for method in ("DELETE", "PUT", "TRACE", "BREW"):
                with subtests.test(route=named(route), method=method):
                    answer = await client.request(method, address(route))
                    is_problem(answer, 405)
                    assert route.method in answer.headers["allow"].split(", ")


async def test_every_answer_fences_browsers_in(quick: Stage, subtests: pytest.Subtests) -> None:
    for route in ROUTES:
        for headers in ({}, bearer(OPERATOR)):
            with subtests.test(route=named(route), headers=headers):
                is_fenced(await ask(quick, route, headers))


def is_fenced(answer: httpx2.Response) -> None:
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert "cache-control" in answer.headers
    assert "access-control-allow-origin" not in answer.headers
