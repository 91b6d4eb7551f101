"""The OpenAPI document describes what is served; Schemathesis asks for all of it in every way it knows."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import openapi_spec_validator
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from relaybox import Outbox
from relaybox.web import api
from relaybox.web.openapi import document
from relaybox.web.routes import ROUTES, Route
from tests.integration.operated import DESTINATIONS, Operated
from tests.web.stage import OPERATOR, USERS, Stage, bearer

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
EXAMPLES = 6
CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance),
    *(negative_data_rejection, unsupported_method),
]


def test_the_document_is_one() -> None:
    openapi_spec_validator.validate(document(ROUTES))


def test_it_describes_every_route_that_is_not_a_page() -> None:
    paths = document(ROUTES)["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES if route.kind != "page"}
    operations = [one["operationId"] for methods in paths.values() for one in methods.values()]
    assert len(operations) == len(set(operations))
    assert all(one["summary"] for methods in paths.values() for one in methods.values())


def rows() -> Iterator[str]:
    for route in ROUTES:
        if route.kind != "page":
            takes = ", ".join(f"`{name}`" for name in _takes(route))
            role = route.role or "everybody"
            yield f"| `{route.method} {route.path}` | {role} | {takes} | {route.summary} |"


def _takes(route: Route) -> tuple[str, ...]:
    return (*route.query.__struct_encode_fields__, *route.body.__struct_encode_fields__)


def test_the_reference_lists_every_route() -> None:
    listed = re.findall(r"^\| `(?:GET|POST) /.*$", PAGE.read_text(), re.MULTILINE)
    assert listed == list(rows())


async def test_it_is_served_with_the_prefix_it_is_under(quick: Stage) -> None:
    found = await quick.get("/api/openapi.json")
    assert found == document(quick.web.routes)
    assert document(ROUTES, "/ops/")["servers"] == [{"url": "/ops"}]


async def test_answers_are_as_it_says(quick: Stage) -> None:
    id_ = quick.operated.emit("mail")
    quick.operated.beat()
    await quick.operated.fail("mail")
    await quick.post("/api/destinations/mail/pause")
    found = document(ROUTES)
    for route in ROUTES:
        if route.method == "GET" and route.kind == "api" and route.answer is not None:
            if "operations/{id}" in route.path:
                continue
            path = route.path.replace("{id}", str(id_)).replace("{name}", "mail")
            answer = f"#/components/schemas/{route.answer.__name__}"
            jsonschema.validate(await quick.get(path), {"$ref": answer, "components": found["components"]})


@pytest.fixture(params=["postgresql-18", "sqlite"])
def address(request: pytest.FixtureRequest, migrated_database: Callable[[str], str]) -> Iterator[str]:
    """Serve an outbox with a few rows over a socket; yield its address."""
    url = migrated_database(request.param)
    asyncio.run(fill(url))
    web = api(Outbox(url, destinations=DESTINATIONS), users=USERS)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(web, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    listener.close()


async def fill(url: str) -> None:
    operated = Operated(url)
    for number in range(5):
        operated.emit("mail", aggregate_id=number)
        operated.emit("shop", aggregate_id=number)
    await operated.fail("mail")
    await operated.close()


@pytest.mark.parametrize("mode", GenerationMode)
def test_whatever_it_can_think_of_is_answered_as_described(address: str, mode: GenerationMode) -> None:
    # That /readyz says 503 where no relay runs is right.
    schema = schemathesis.openapi.from_dict(document(one for one in ROUTES if one.path != "/readyz"))
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=EXAMPLES,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(base_url=address, headers=bearer(OPERATOR), checks=CHECKS, timeout=60)

        try:
            ask()
        except Unsatisfiable:
            # It takes nothing, so that nothing can be wrong with it.
            assert mode is GenerationMode.NEGATIVE
    assert asked > 20
