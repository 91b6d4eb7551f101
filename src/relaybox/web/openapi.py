"""The OpenAPI document, generated from the route table and the schemas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from relaybox.operate import documents
from relaybox.web import schemas
from relaybox.web.problems import MEDIA_TYPE
from relaybox.web.security import prefix

if TYPE_CHECKING:
    from relaybox.web.routes import Route

REF = "#/components/schemas/{name}"
PROBLEM = {
    "description": "What went wrong, as RFC 9457 has it.",
    "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(name="ProblemDocument")}}},
}


async def openapi(request: Request) -> dict[str, Any]:
    """This document."""
    return document(request.app.routes, prefix(request))


def document(routes: Iterable[Route], prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes that are not pages."""
    served = [route for route in routes if route.kind != "page"]
    types = {kind for route in served for kind in (route.body, route.answer) if _is_struct(kind)}
    types |= {schemas.ProblemDocument, documents.OperationDocument}
    _, components = msgspec.json.schema_components(
        sorted(types, key=lambda one: one.__name__), ref_template=REF
    )
    for schema in components.values():
        schema["description"] = inspect.cleandoc(schema.get("description", ""))
    paths: dict[str, dict[str, Any]] = {}
    for route in served:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bearer = {"type": "http", "scheme": "bearer", "description": "A token of [web.users.NAME]."}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Relaybox",
            "version": version("relaybox"),
            "description": "Questions and actions of operators of a transactional outbox.",
        },
        "servers": [{"url": prefix.rstrip("/") or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": bearer}},
        "security": [{"bearer": []}],
    }


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not schemas.Nothing


def _ref(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(name=kind.__name__)}}


def _operation(route: Route) -> dict[str, Any]:
    kinds = {"id": {"type": "string", "format": "uuid"}, "name": {"type": "string", "minLength": 1}}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": kinds[name]}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    _, components = msgspec.json.schema_components([route.query], ref_template=REF)
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": _present(one)}
        for name, one in components[route.query.__name__]["properties"].items()
    ]
    described: dict[str, Any] = {
        "operationId": route.endpoint.__name__,
        "summary": route.summary,
        "parameters": in_path + in_query,
        "responses": _responses(route),
    }
    if route.role is None:
        described["security"] = []
    else:
        described["description"] = f"For the role {route.role}."
    if _is_struct(route.body):
        described["requestBody"] = {
            "required": any(field.required for field in msgspec.structs.fields(route.body)),
            "content": {"application/json": _ref(route.body)},
        }
    return described


def _present(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from the schema of a query parameter: a missing one is left out, never null."""
    kinds = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if schema.get("default") is not None:
        rest["default"] = schema["default"]
    if "enum" in rest:
        rest["enum"] = [one for one in rest["enum"] if one is not None]
    return {**rest, **kinds[0]} if kinds else rest


def _responses(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"type": "object"}}
    if route.answer is not None:
        content = _ref(route.answer)
    if route.media_type != "application/json":
        content = {"schema": {"type": "string"}}
    answer = {"description": route.summary or "Done.", "content": {route.media_type: content}}
    responses: dict[str, Any] = {"200": answer, "4XX": PROBLEM, "5XX": PROBLEM}
    if issubclass(route.body, schemas.ActionBody | schemas.MoveBody):
        operation = {"application/json": _ref(documents.OperationDocument)}
        responses["202"] = {"description": "It goes on in the background.", "content": operation}
    if route.path == "/readyz":
        responses["503"] = answer
    return responses
