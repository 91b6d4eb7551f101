"""Turn an event into the change of a document, by the options in ``docs/how-to/search.md``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from relaybox.core.event import Delivery, Event
from relaybox.core.imports import load
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.schemes import SEARCH_ENGINES
from relaybox.core.settings import Destination
from relaybox.core.values import Parse, either, parse_table, wrong
from relaybox.errors import ConfigError, did_you_mean, shorten
from relaybox.search.engine import Change
from relaybox.sinks.broker import Address, Template, flag, parse_address, text
from relaybox.sinks.handler import is_async
from relaybox.sinks.sink import being_cancelled, describe
from relaybox.sinks.threads import Threads
from relaybox.wire.codec import Limits, decode, encode_payload
from relaybox.wire.envelope import event_of

Action: TypeAlias = Literal["index", "delete", "ignore"]

log = logging.getLogger("relaybox.search")

DEFAULT_ACTIONS: Mapping[str, Action] = {"*.created": "index", "*.updated": "index", "*.deleted": "delete"}
DEFAULT_INDEX = "{aggregate_type}"
INDEX_HEADER = "relaybox-index"
"""The header of an event for one index only."""
BUILDING = "__building"
"""The suffix of an index that is being built."""

_ACTIONS: tuple[Action, ...] = get_args(Action)
_VERSION = re.compile(r"\.v[0-9]+\Z")
LIMITS = Limits(max_bytes=1 << 40)


def _actions(value: Mapping[str, Any], setting: str) -> Mapping[str, Action]:
    table = parse_table(value, setting)
    for pattern, action in table.items():
        if action not in _ACTIONS:
            hint = did_you_mean(str(action), _ACTIONS)
            raise wrong(f"{setting}: {pattern}", action, f"choose {either(*map(repr, _ACTIONS))}{hint}")
    return table


def _function(value: str | Callable[[Event], Any], setting: str) -> Callable[[Event], Any]:
    fix = "write module:function, or give the function itself"
    found = load(value, f"{setting} = {value!r}", fix) if isinstance(value, str) else value
    if not callable(found):
        raise wrong(setting, value, f"it is not a function; {fix}")
    return found


SEARCH_OPTIONS: dict[str, Parse[Any]] = {
    "id_field": text,
    "create_index": flag,
    "document": _function,
    "reread": flag,
    "actions": _actions,
}
"""The options of every search destination, for ``parse_address``."""


class _Others(dict[str, Parse[Any]]):
    """Accepts any other option too: the engine checks those."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Parse[Any]:
        return lambda value, _: value


def search_address(destination: Destination) -> Address:
    """Return a search destination's URL with ``SEARCH_OPTIONS`` parsed; other options stay unchanged."""
    return parse_address(destination, 1, _Others(SEARCH_OPTIONS))


def index_of(destination: Destination) -> Template:
    """Return the template of the index name: the path of the URL."""
    path = search_address(destination).path
    if path.endswith(BUILDING):
        setting = f"destination {destination.name!r}: index = {path!r}"
        raise ConfigError(f"{setting}: names that end with {BUILDING} are of indexes that are being rebuilt")
    return Template(path or DEFAULT_INDEX, destination, "index", lower=not path)


class Changes:
    """Makes changes from deliveries, by the options of a destination."""

    def __init__(self, destination: Destination, options: Mapping[str, Any]) -> None:
        self._name = destination.name
        self._timeout = destination.timeout
        self._id_field: str = options.get("id_field", "id")
        self._document: Callable[[Event], Any] | None = options.get("document")
        self.reread: bool = options.get("reread", False)
        if self.reread and self._document is None:
            raise ConfigError(f"destination {self._name!r}: reread is of no use without document; write both")
        self._in_loop = self._document is not None and is_async(self._name, self._document)
        given: Mapping[str, Action] = options.get("actions", {})
        defaults = {name: action for name, action in DEFAULT_ACTIONS.items() if name not in given}
        self._patterns = [
            (re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL), action)
            for pattern, action in {**given, **defaults}.items()
        ]
        # Bounded, because an application may generate event types.
        self._find = functools.lru_cache(4096)(self._match)
        self._threads = Threads(destination.name)

    def action_of(self, event_type: str) -> Action:
        """Return what an event of this type does to its document. Raise ``Reject`` if no pattern matches."""
        action = self._find(event_type)
        if action is None:
            fix = f"write it into the options of {self._name!r}: actions = {{ {event_type!r} = 'index' }}"
            raise Reject(f"no action is known for events of the type {event_type!r}; {fix}")
        return action

    @property
    def waits(self) -> bool:
        """True if a function makes the documents, which may take time."""
        return self._document is not None

    async def change_of(self, delivery: Delivery) -> Change | None:
        """Return the change, or None to ignore the event. Raise ``Reject``, ``Retry`` or ``Unavailable``."""
        action = self.action_of(delivery.event_type)
        if self._document is None or action == "ignore" or not (self.reread or action == "index"):
            return self.change_at_once(delivery)
        key = delivery.aggregate_id
        made = _plain(await self._made(self._document, event_of(delivery)))
        return Change(key, None if made is None else self._named(made, key), delivery.position)

    def change_at_once(self, delivery: Delivery) -> Change | None:
        """Return the change from the event alone, without calling the function."""
        action = self.action_of(delivery.event_type)
        if action == "ignore":
            return None
        key = delivery.aggregate_id
        if action == "delete":
            return Change(key, None, delivery.position)
        payload = event_of(delivery).payload
        if not isinstance(payload, dict):
            fix = "a document is a JSON object; emit one, or make it with the option document"
            raise Reject(f"the payload is {_kind(payload)}; {fix}")
        return Change(key, self._named(payload, key), delivery.position)

    @property
    def overdue(self) -> int:
        """Return the number of functions that exceed their timeout and still run."""
        return self._threads.longer_than(self._timeout)

    def close(self) -> None:
        """Close the threads; one that is inside a function ends after it."""
        self._threads.close()

    def _match(self, event_type: str) -> Action | None:
        forms = (event_type, _VERSION.sub("", event_type))
        found = (action for pattern, action in self._patterns if any(map(pattern.fullmatch, forms)))
        return next(found, None)

    def _named(self, document: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the document with the aggregate's id. Raise ``Reject`` if it has another one."""
        own = document.setdefault(self._id_field, key)
        if own != key and (isinstance(own, bool) or str(own) != key):
            clash = f"the document's {self._id_field!r} is {shorten(own)}, the aggregate's id {shorten(key)}"
            raise Reject(f"{clash}; they have to be the same: see the option id_field")
        return document

    async def _made(self, function: Callable[[Event], Any], event: Event) -> Any:
        """Call the function; raise ``Retry`` if it fails or takes too long."""
        late = asyncio.timeout(self._timeout)
        try:
            async with late:
                if self._in_loop:
                    made = function(event)
                else:
                    self._threads.check_room()
                    made = await self._threads.call(function, event)
                return await made if inspect.isawaitable(made) else made
        except (Retry, Reject, Unavailable, GeneratorExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            if late.expired() and isinstance(error, TimeoutError):
                raise Retry(f"the document function took longer than {self._timeout:g}s") from None
            log.warning(
                "%s: the document function failed with %s", self._name, describe(error), exc_info=error
            )
            raise Retry(f"the document function failed with {describe(error)}") from error


def check_target(destination: Destination, event_type: str) -> None:
    """Raise ``ConfigError`` if a search destination would refuse or ignore events of this type."""
    changes = changes_of(destination)
    if changes is None:
        return
    try:
        action = changes.action_of(event_type)
    except Reject as refused:
        raise ConfigError(f"destination {destination.name!r}: {refused}") from None
    if action != "index":
        fix = "choose another with event_type, or change the option actions"
        raise ConfigError(
            f"destination {destination.name!r}: for events of the type {event_type!r} it does {action}; {fix}"
        )


def rereads(destination: Destination) -> bool:
    """True if the destination writes the newest state of a document, not the event's."""
    changes = changes_of(destination)
    return changes is not None and changes.reread


def changes_of(destination: Destination) -> Changes | None:
    """Return the ``Changes`` of a search destination, or None for any other."""
    if destination.scheme not in SEARCH_ENGINES:
        return None
    return Changes(destination, search_address(destination).options)


def _plain(made: Any) -> dict[str, Any] | None:
    """Return the function's result as plain JSON types. Raise ``Reject`` if it is not a document."""
    if made is None:
        return None
    payload, data, encoding = encode_payload(made, LIMITS)
    plain = decode(payload, data, encoding)
    if not isinstance(plain, dict):
        raise Reject(f"the document function returned {_kind(plain)}; return a mapping, or None to delete it")
    return plain


_KINDS = {type(None): "null", list: "a list", str: "a text", bytes: "bytes", bool: "true or false"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a number")
