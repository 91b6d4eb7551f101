"""Errors of the web as RFC 9457 documents, and the translation of Relaybox's own errors into them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

from relaybox.errors import ConfigError, MissingExtra, SchemaError, StoreError
from relaybox.operate.bulk import TooManyOperations
from relaybox.operate.documents import made, to_json
from relaybox.web.schemas import ProblemDocument

log = logging.getLogger("relaybox.web")

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """An error that is answered with a status and a reason."""

    def __init__(
        self,
        status: int,
        detail: str,
        headers: Mapping[str, str] | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.title = HTTPStatus(status).phrase
        self.detail = detail
        self.headers = dict(headers or {})
        self.parameter = parameter

    def response(self) -> Response:
        """Return the problem as ``application/problem+json``."""
        document = made(ProblemDocument, self, type="about:blank")
        headers = {"cache-control": "no-store", **self.headers}
        return Response(to_json(document).encode(), self.status, headers, MEDIA_TYPE)


def invalid(parameter: str, detail: str) -> Problem:
    """Return the problem of a wrong parameter or field of the body."""
    return Problem(422, f"{parameter}: {detail}", parameter=parameter)


def translate(error: Exception) -> Problem:
    """Return the problem for an error, without its text if that may contain secrets."""
    match error:
        case Problem():
            return error
        case SchemaError():
            return Problem(503, _line(error), {"retry-after": "30"})
        case StoreError():
            log.warning("the database refused or could not be reached: %s", _line(error))
            detail = "The database refused or could not be reached; try again."
            return Problem(503, detail, {"retry-after": "5"})
        case TimeoutError():
            log.warning("a request took too long")
            return Problem(503, "The database took too long to answer; try again.", {"retry-after": "5"})
        case TooManyOperations():
            return Problem(429, _line(error), {"retry-after": "10"})
        case MissingExtra():
            return Problem(501, _line(error))
        case ConfigError():
            return Problem(422, _line(error))
        case HTTPException():
            return Problem(error.status_code, error.detail, error.headers)
    log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return Problem(500, "This is a defect; the log of the server tells more.")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
