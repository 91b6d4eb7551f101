"""Documents and settings as the imitation of Meilisearch takes or refuses them."""

from __future__ import annotations

import re
from typing import Any

from msgspec import DecodeError, Raw, json

LONGEST_ID = 511
MOST_FIELDS = 65_535
_ID = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)

SETTINGS: dict[str, Any] = {
    "displayedAttributes": ["*"],
    "searchableAttributes": ["*"],
    "filterableAttributes": [],
    "sortableAttributes": [],
    "rankingRules": ["words", "typo", "proximity", "attribute", "sort", "exactness"],
    "stopWords": [],
    "nonSeparatorTokens": [],
    "separatorTokens": [],
    "dictionary": [],
    "synonyms": {},
    "distinctAttribute": None,
    "proximityPrecision": "byWord",
    "typoTolerance": {
        "enabled": True,
        "minWordSizeForTypos": {"oneTypo": 5, "twoTypos": 9},
        "disableOnWords": [],
        "disableOnAttributes": [],
        "disableOnNumbers": False,
    },
    "faceting": {"maxValuesPerFacet": 100, "sortFacetValuesBy": {"*": "alpha"}},
    "pagination": {"maxTotalHits": 1000},
    "searchCutoffMs": None,
    "localizedAttributes": None,
    "facetSearch": True,
    "prefixSearch": "indexingTime",
}

TYPES = {
    "internal": "internal",
    "database_size_limit_reached": "internal",
    "no_space_left_on_device": "system",
    "io_error": "system",
    "too_many_open_files": "system",
}
"""The types of the errors that are not ``invalid_request``."""


class Failed(Exception):
    """What makes a task fail, or a request."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status

    def as_json(self) -> dict[str, str]:
        auth = self.code in ("missing_authorization_header", "invalid_api_key")
        return {
            "message": self.message,
            "code": self.code,
            "type": "auth" if auth else TYPES.get(self.code, "invalid_request"),
            "link": f"https://docs.meilisearch.com/errors#{self.code}",
        }


def split_documents(body: bytes, *, lines: bool) -> list[bytes]:
    """Return the documents of a payload as they are written; raise ``Failed`` if it has none."""
    kind = "ndjson" if lines else "json"
    if not body.strip():
        raise Failed("missing_payload", f"A {kind} payload is missing.")
    try:
        if lines:
            found = [line for line in body.split(b"\n") if line.strip()]
        elif body.lstrip()[:1] == b"{":
            found = [body]
        else:
            found = [bytes(raw) for raw in json.decode(body, type=list[Raw])]
        for raw in found:
            _as_object(raw)
    except DecodeError as error:
        raise Failed("malformed_payload", f"The `{kind}` payload provided is malformed. `{error}`.") from None
    return found


_as_object = json.Decoder(dict[str, Raw]).decode


def primary_key(known: str | None, asked: str | None, documents: list[dict[str, Any]]) -> str:
    if known is not None:
        if asked not in (None, known):
            said = f"Index already has a primary key: `{known}`."
            raise Failed("index_primary_key_already_exists", said)
        return known
    if asked is not None:
        return asked
    candidates = [name for name in (documents or [{}])[0] if name.lower().endswith("id")]
    if not candidates:
        said = "The primary key inference failed as the engine did not find any field ending with `id`."
        raise Failed("index_primary_key_no_candidate_found", said)
    if len(candidates) > 1:
        said = (
            f"The primary key inference failed as the engine found {len(candidates)} fields ending with `id`."
        )
        raise Failed("index_primary_key_multiple_candidates_found", said)
    return candidates[0]


def identifier(document: dict[str, Any], key: str, settings: dict[str, Any], uid: str) -> str:
    if key not in document:
        said = f"Document doesn't have a `{key}` attribute: `{json.encode(document).decode()}`."
        raise Failed("missing_document_id", said)
    value = document[key]
    name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not _ID.fullmatch(name) or len(name) > LONGEST_ID:
        said = f"Document identifier `{json.encode(value).decode()}` is invalid."
        raise Failed("invalid_document_id", said)
    if len(document) > MOST_FIELDS:
        raise Failed("document_fields_limit_reached", "A document cannot contain more than 65,535 fields.")
    geo = document.get("_geo")
    located = {"_geo"} & {*settings["filterableAttributes"], *settings["sortableAttributes"]}
    if located and geo is not None and not isinstance(geo, dict):
        shown = json.encode(value).decode()
        said = f"Index `{uid}`: The `_geo` field in the document with the id: `{shown}` is not an object."
        raise Failed("invalid_document_geo_field", said)
    return name
