"""From an event to the change of a document: which action its type stands for, its id, and what is written.

| option | |
|---|---|
| ``actions`` | event-type pattern → ``index``, ``delete`` or ``ignore``; they go before ``DEFAULT_ACTIONS`` |
| ``id_field`` | the document's field that holds the aggregate's id |
| ``document`` | a function that makes the document of the event; None deletes it |
| ``reread`` | the function is asked for every event, deletes too: what it gives is the newest state |
"""

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
from relaybox.core.values import Parse, parse_table, wrong
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
"""The header of an event that is for one index only."""
BUILDING = "__building"
"""What the name of an index that is being rebuilt ends with."""

_ACTIONS: tuple[Action, ...] = get_args(Action)
_VERSION = re.compile(r"\.v[0-9]+\Z")
LIMITS = Limits(max_bytes=1 << 40)


def _actions(value: Mapping[str, Any], setting: str) -> Mapping[str, Action]:
    table = parse_table(value, setting)
    for pattern, action in table.items():
        if action not in _ACTIONS:
            hint = did_you_mean(str(action), _ACTIONS)
            raise wrong(f"{setting}: {pattern}", action, f"choose {', '.join(map(repr, _ACTIONS))}{hint}")
    return table


def _function(value: str | Callable[[Event], Any], setting: str) -> Callable[[Event], Any]:
    fix = "write module:function, or give the function itself"
    found = load(value, f"{setting} = {value!r}", fix) if isinstance(value, str) else value
    if not callable(found):
        raise wrong(setting, value, f"it is no function; {fix}")
    return found


SEARCH_OPTIONS: dict[str, Parse[Any]] = {
    "id_field": text,
    "create_index": flag,
    "document": _function,
    "reread": flag,
    "actions": _actions,
}
"""What every search destination may say, as ``parse_address`` takes it."""


class _Others(dict[str, Parse[Any]]):
    """Takes any option beside those it knows: an engine has checked them."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Parse[Any]:
        return lambda value, _: value


def search_address(destination: Destination) -> Address:
    """The URL of a search destination with the options of ``SEARCH_OPTIONS``; others are left as they are."""
    return parse_address(destination, 1, _Others(SEARCH_OPTIONS))


def index_of(destination: Destination) -> Template:
    """The name of the index for each event: the path of the URL."""
    path = search_address(destination).path
    if path.endswith(BUILDING):
        setting = f"destination {destination.name!r}: index = {path!r}"
        raise ConfigError(f"{setting}: names that end with {BUILDING} are of indexes that are being rebuilt")
    return Template(path or DEFAULT_INDEX, destination, "index", lower=not path)


class Changes:
    """Makes changes of deliveries, as the options of a destination say."""

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
        # Bounded, because an application may make up event types as it goes.
        self._find = functools.lru_cache(4096)(self._match)
        self._threads = Threads(destination.name)

    def action_of(self, event_type: str) -> Action:
        """What an event of this type does to its document; raises ``Reject`` where nothing says."""
        action = self._find(event_type)
        if action is None:
            fix = f"write it into the options of {self._name!r}: actions = {{ {event_type!r} = 'index' }}"
            raise Reject(f"no action is known for events of the type {event_type!r}; {fix}")
        return action

    @property
    def waits(self) -> bool:
        """Whether a function makes the documents, for which one may have to wait."""
        return self._document is not None

    async def change_of(self, delivery: Delivery) -> Change | None:
        """What becomes of the document, None where the event is ignored.

        Raises ``Reject`` where there is no telling, and whatever the function raises.
        """
        action = self.action_of(delivery.event_type)
        if self._document is None or action == "ignore" or not (self.reread or action == "index"):
            return self.change_at_once(delivery)
        key = delivery.aggregate_id
        made = _plain(await self._made(self._document, event_of(delivery)))
        return Change(key, None if made is None else self._named(made, key), delivery.position)

    def change_at_once(self, delivery: Delivery) -> Change | None:
        """``change_of``, of the event alone."""
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
        """The number of functions that are over their time and still running."""
        return self._threads.longer_than(self._timeout)

    def close(self) -> None:
        """Let the threads end; one that is still in a function ends after it."""
        self._threads.close()

    def _match(self, event_type: str) -> Action | None:
        forms = (event_type, _VERSION.sub("", event_type))
        found = (action for pattern, action in self._patterns if any(map(pattern.fullmatch, forms)))
        return next(found, None)

    def _named(self, document: dict[str, Any], key: str) -> dict[str, Any]:
        """The document with its id, which is the aggregate's."""
        own = document.setdefault(self._id_field, key)
        if own != key and (isinstance(own, bool) or str(own) != key):
            told = f"the document's {self._id_field!r} is {shorten(own)}, the aggregate's id {shorten(key)}"
            raise Reject(f"{told}; they have to be the same: see the option id_field")
        return document

    async def _made(self, function: Callable[[Event], Any], event: Event) -> Any:
        """What the function returns; anything that it raises is about this event."""
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
    """Raise where a search destination would refuse, or ignore, events of this type."""
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
    """True if the destination asks for the newest state of a document, whatever the event says."""
    changes = changes_of(destination)
    return changes is not None and changes.reread


def changes_of(destination: Destination) -> Changes | None:
    """What a search destination makes of events; None of another destination."""
    if destination.scheme not in SEARCH_ENGINES:
        return None
    return Changes(destination, search_address(destination).options)


def _plain(made: Any) -> dict[str, Any] | None:
    """What a function made of an event, as JSON knows it; raises ``Reject`` where it is no document."""
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
