"""Read an Algolia application, its hosts and its key from a destination's URL and options.

``host`` names servers instead of Algolia's, as host:port, several with commas; ``tls`` is for those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any, NamedTuple

from msgspec import json

from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.core.values import Parse, mask_url, wrong
from relaybox.errors import ConfigError
from relaybox.search.change import SEARCH_OPTIONS
from relaybox.search.engine import Change
from relaybox.sinks.broker import TLS_OPTIONS, flag, parse_address, text, tls_context

_HOSTS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/?#@,\[\]]+):[0-9]{1,5}", re.ASCII)


class Application(NamedTuple):
    """An application, its hosts for writes and for reads, and how records are stored."""

    id: str
    key: str
    writing: tuple[str, ...]
    reading: tuple[str, ...]
    where: str
    ssl: SSLContext | None
    id_field: str
    version_field: str | None

    def action_of(self, change: Change) -> bytes:
        """Return the action for a batch. Raise ``Reject`` if Algolia cannot store the document."""
        if not change.id:
            raise Reject("the aggregate's id is empty, and an objectID must not be")
        if change.document is None:
            return json.encode({"action": "deleteObject", "body": {"objectID": change.id}})
        document, version = change.document, self.version_field
        if "objectID" in document and self.id_field != "objectID":
            fix = "leave it out, or set id_field = objectID"
            raise Reject(f"the document has an attribute objectID, which is Algolia's own; {fix}")
        if version is None:
            return json.encode({"action": "updateObject", "body": {**document, "objectID": change.id}})
        if version in document:
            raise Reject(
                f"the document has the attribute {version!r}, which is the version_field; rename one"
            )
        for name, value in document.items():
            if isinstance(value, Mapping) and "_operation" in value:
                raise Reject(f"the attribute {name!r} has a key _operation, which would be done, not kept")
        guard = {"_operation": "IncrementSet", "value": change.version}
        body = {**document, "objectID": change.id, version: guard}
        return json.encode({"action": "partialUpdateObject", "body": body})

    def document_of(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record without the attributes that Relaybox added."""
        added = {self.version_field, "objectID"} - {self.id_field}
        return {name: value for name, value in record.items() if name not in added}


def _hosts(value: str, setting: str) -> tuple[str, ...]:
    hosts = tuple(text(value, setting).split(","))
    if not all(map(_HOSTS.fullmatch, hosts)):
        raise wrong(setting, value, "write host:port")
    return hosts


OPTIONS: dict[str, Parse[Any]] = {"host": _hosts, "tls": flag, "version_field": text}


def application_of(destination: Destination) -> Application:
    """Return what the URL and the options say. Raise ``ConfigError``."""
    address = parse_address(destination, 443, {**SEARCH_OPTIONS, **OPTIONS, **TLS_OPTIONS})
    options, setting = address.options, f"destination {destination.name!r}"
    if not address.password:
        raise ConfigError(f"{setting}: Algolia needs an API key; set auth to one that may write the index")
    encrypted, own = options.get("tls", True), options.get("host")
    if not encrypted and own is None:
        raise ConfigError(f"{setting}: tls = false is for a server of your own; name it in host")
    if not encrypted and (given := [name for name in TLS_OPTIONS if name in options]):
        raise ConfigError(f"{setting}: {given[0]} is of no use with tls = false; keep one of them")
    if options.get("version_field") in ("objectID", options.get("id_field", "id")):
        raise ConfigError(f"{setting}: version_field must be another attribute than the id's")
    id_ = _application_id(destination)
    writing, reading = _bases(id_, own, "https" if encrypted else "http")
    return Application(
        id_,
        address.password,
        writing,
        reading,
        own[0] if own else f"{id_}.algolia.net",
        tls_context(options, destination) if encrypted else None,
        options.get("id_field", "id"),
        options.get("version_field"),
    )


def _bases(
    application: str, own: tuple[str, ...] | None, scheme: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hosts for writes and for reads, in the order to ask them."""
    if own is not None:
        bases = tuple(f"{scheme}://{host}" for host in own)
        return bases, bases
    others = tuple(f"{scheme}://{application}-{number}.algolianet.com" for number in (1, 2, 3))
    first, near = f"{scheme}://{application}.algolia.net", f"{scheme}://{application}-dsn.algolia.net"
    return (first, *others), (near, *others)


def _application_id(destination: Destination) -> str:
    """Return the URL's host in its original case: the header needs capitals."""
    found = re.match(r"[^:]*://(?:[^/?#]*@)?([A-Za-z0-9]+)(?:[/?]|\Z)", destination.url)
    if found is None:
        masked = mask_url(destination.sink)
        fix = "write algolia://APPLICATION-ID/index"
        raise ConfigError(f"destination {destination.name!r}: sink = {masked!r}: {fix}")
    return found[1]
