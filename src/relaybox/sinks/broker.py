"""Share code between the sinks of brokers: URLs and options, TLS, name templates, messages, a connection."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Coroutine, Mapping
from string import Formatter
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote

from msgspec import DecodeError, defstruct, json, to_builtins

from relaybox.core.event import Delivery
from relaybox.core.ordering import fitting
from relaybox.core.outcome import Reject, Unreachable
from relaybox.core.scrub import conceal
from relaybox.core.settings import Destination, Secret
from relaybox.core.values import Parse, either, mask_url, parse_count, wrong
from relaybox.errors import ConfigError, UnknownSetting, did_you_mean
from relaybox.sinks.sink import clean
from relaybox.wire.envelope import Envelope, Pack, packer
from relaybox.wire.tracing import NAMES

KeyOf: TypeAlias = Callable[[Delivery], str | None]

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]@]+))(?::([0-9]{0,5}))?", re.ASCII)

FIELDS = ("aggregate_type", "aggregate_id", "event_type", "tenant", "destination")
"""The fields that a template may use."""


class Address(NamedTuple):
    """The parts of a sink's URL. ``path`` has no leading slash; ``options`` are checked."""

    hosts: tuple[tuple[str, int], ...]
    user: str | None
    password: str | None
    path: str
    options: dict[str, Any]

    @property
    def netlocs(self) -> list[str]:
        """Return the ``host:port`` of each host, as written in a URL."""
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts]

    @property
    def where(self) -> str:
        """Return the hosts, for messages."""
        return ", ".join(f"{host}:{port}" for host, port in self.hosts)


def parse_address(
    destination: Destination,
    port: int,
    options: Mapping[str, Parse[Any]],
    *,
    host_optional: bool = False,
    one_host: bool = False,
) -> Address:
    """Parse a sink's URL and options, with ``auth`` as the missing password; raise ``ConfigError``."""
    setting = f"destination {destination.name!r}: sink"
    # Split as in RFC 3986: urllib allows only one host.
    match = re.fullmatch(r"[^:]*:(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(#.*)?", destination.url, re.DOTALL)
    if match is None:
        raise ConfigError(
            f"{setting} = {destination.sink!r} has no address; write it as {destination.sink}://…"
        )
    if match[4]:
        masked = mask_url(destination.sink).partition("#")[0]
        raise ConfigError(f"{setting} = {masked!r} goes on after a '#'; write %23 where one is meant")
    login, _, places = (match[1] or "").rpartition("@")
    user, colon, password = login.partition(":")
    if destination.auth is not None and colon:
        raise ConfigError(f"{setting} holds a password, and auth is set too; keep one of them")
    hosts = [] if host_optional and not places else places.split(",")
    address = Address(
        tuple(_host(place, port, setting, destination) for place in hosts),
        unquote(user) or None,
        unquote(password) if colon else reveal(destination, "auth"),
        unquote(match[2].removeprefix("/")),
        _options(destination, _given(destination, match[3] or "", setting), options),
    )
    if address.password is not None:
        conceal(address.password, b64encode(f"{address.user or ''}:{address.password}".encode()).decode())
    if one_host and len(hosts) > 1:
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} names more than one host; keep one")
    return address


def _given(destination: Destination, query: str, setting: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in given:
            raise ConfigError(f"{setting} says {name!r} twice; keep one of them")
        given[name] = value
    twice = sorted(given.keys() & destination.options.keys())
    if twice:
        raise ConfigError(f"{setting} and options both say {twice[0]!r}; keep one of them")
    return {**given, **destination.options}


def _host(place: str, port: int, setting: str, destination: Destination) -> tuple[str, int]:
    match = _HOST.fullmatch(place)
    if match is None or not 0 < int(match[3] or port) < 65536:
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r}: write host:port, or a host alone")
    return (match[1] or match[2]).lower(), int(match[3] or port)


def reveal(destination: Destination, name: Literal["auth", "secret"]) -> str | None:
    """Read a secret of the destination; raise ``ConfigError`` that names the setting."""
    secret: Secret | None = getattr(destination, name)
    try:
        return None if secret is None else secret.reveal()
    except ConfigError as error:
        raise ConfigError(f"destination {destination.name!r}: {name}: {error}") from None


def _options(
    destination: Destination, given: Mapping[str, Any], known: Mapping[str, Parse[Any]]
) -> dict[str, Any]:
    where = f"destination {destination.name!r}: the {destination.scheme} sink"
    for name in given:
        if name not in known:
            raise UnknownSetting(name, known, where)
    return {name: known[name](value, f"{where}: {name}") for name, value in given.items()}


def text(value: str, setting: str) -> str:
    """Parse an option that is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise wrong(setting, value, "write a text")
    return value


def count(value: str | int, setting: str) -> int:
    """Parse an option that is a whole number of at least 1, or a string of one."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value, re.ASCII):
        value = int(value)
    if isinstance(value, str):
        raise wrong(setting, value, "write a whole number, 1 or more")
    return parse_count(value, setting)


def flag(value: str | bool, setting: str) -> bool:
    """Parse an option that is true or false, or a string of one of these."""
    if value is True or value == "true":
        return True
    if value is False or value == "false":
        return False
    raise wrong(setting, value, "write true or false")


def one_of(*allowed: str) -> Parse[str]:
    """Return a parser of an option that is one of these values."""

    def parse(value: str, setting: str) -> str:
        if value not in allowed:
            raise wrong(setting, value, f"choose {either(*map(repr, allowed))}")
        return value

    return parse


TLS_OPTIONS = {"ca": text, "certificate": text, "key": text}


def tls_context(options: Mapping[str, Any], destination: Destination) -> ssl.SSLContext:
    """Return a context that verifies the server; raise ``ConfigError`` if a file cannot be read."""
    setting = f"destination {destination.name!r}"
    if "key" in options and "certificate" not in options:
        raise ConfigError(f"{setting}: key is of no use without certificate; write both")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "certificate" in options:
            context.load_cert_chain(options["certificate"], options.get("key"))
    except OSError as error:
        files = ", ".join(f"{name} = {options[name]!r}" for name in TLS_OPTIONS if name in options)
        raise ConfigError(f"{setting}: {files} cannot be read: {error}") from None
    return context


class Template:
    """A name made of an event's fields, such as ``{aggregate_type}-events``."""

    def __init__(self, written: str, destination: Destination, what: str, *, lower: bool = False) -> None:
        setting = f"destination {destination.name!r}: {what}"
        try:
            parts = list(Formatter().parse(written))
        except ValueError as error:
            raise ConfigError(f"{setting} = {written!r}: {error}") from None
        for _, name, spec, conversion in parts:
            if name is not None and name not in FIELDS:
                raise ConfigError(f"{setting} = {written!r} names {name!r}{did_you_mean(name, FIELDS)}")
            if spec or conversion:
                raise ConfigError(f"{setting} = {written!r}: write the fields plainly, such as {{tenant}}")
        self._written = written
        self._what = what
        self._lower = lower
        self.fields = frozenset(name for _, name, _, _ in parts if name is not None)
        self.fixed = None if self.fields else written.format()
        """The name, if it is the same for every event."""

    def __call__(self, delivery: Delivery) -> str:
        """Return the name for one event; raise ``Reject`` if the event lacks a field."""
        if self.fixed is not None:
            return self.fixed
        values = {name: getattr(delivery, name) for name in self.fields if name != "tenant"}
        if "tenant" in self.fields:
            values["tenant"] = tenant_of(delivery)
            if values["tenant"] is None:
                raise Reject(f"the {self._what} {self._written!r} needs a tenant; emit with tenant=")
        name = self._written.format(**values)
        return name.lower() if self._lower else name


def header_reader(name: str) -> KeyOf:
    """Return a function of a delivery that returns this header of the event, and decodes no other."""
    header = defstruct("Header", [("text", str | None, None)], rename={"text": name}, gc=False)
    decode: Callable[[str], Any] = json.Decoder(header).decode
    quoted = f'"{name}"'

    def read(delivery: Delivery) -> str | None:
        if quoted not in delivery.headers:
            return None
        try:
            text: str | None = decode(delivery.headers).text
        except DecodeError:
            return None
        return text

    return read


tenant_of = header_reader("tenant")
_decode_headers = json.Decoder(dict[str, Any]).decode


def key_of(destination: Destination) -> KeyOf:
    """Return the function of a message's partition key: its own ordering key, else one by ``ordering``."""

    def by_aggregate(delivery: Delivery) -> str | None:
        own = delivery.ordering_key
        if own is None or own == fitting(f"{delivery.aggregate_type}:{delivery.aggregate_id}"):
            return delivery.aggregate_id
        return own

    def by_other(delivery: Delivery) -> str | None:
        own = delivery.ordering_key
        return own if own is not None or otherwise is None else otherwise(delivery)

    others: dict[str, KeyOf] = {"event_type": lambda delivery: delivery.event_type, "tenant": tenant_of}
    otherwise = others.get(str(destination.ordering))
    return by_aggregate if destination.ordering == "aggregate" else by_other


_COPIES = ("relaybox-replay", "relaybox-dead-letter-from")


def deduplicated_by(message: Envelope, delivery: Delivery) -> str:
    """Return the event's id; a replay or dead letter has an id of its own, so that it is not dropped."""
    copied = any(mark in message.headers for mark in _COPIES)
    return str(delivery.id) if copied else message.headers["event-id"]


class Messages:
    """Makes messages for a broker in a destination's format."""

    def __init__(self, destination: Destination) -> None:
        self._pack: Pack = packer(destination.format)

    def __call__(self, delivery: Delivery) -> Envelope:
        """Return the body and the headers; our headers replace the event's own of the same name."""
        envelope = self._pack(delivery)
        ours = {
            # The same text as str(), in a third of the time.
            "event-id": to_builtins(delivery.event_id),
            "event-type": delivery.event_type,
            "aggregate-type": delivery.aggregate_type,
            "aggregate-id": delivery.aggregate_id,
        }
        if delivery.headers != "{}":
            ours = {**_own(delivery), **envelope.headers, **ours}
        return Envelope(envelope.body, envelope.content_type, ours)


def _own(delivery: Delivery) -> dict[str, str]:
    """Return the emitter's headers as texts; malformed JSON is left to the envelope."""
    try:
        headers = _decode_headers(delivery.headers)
    except DecodeError:
        return {}
    for name in NAMES:
        headers.pop(name, None)
    return {
        name: value if isinstance(value, str) else json.encode(value).decode()
        for name, value in headers.items()
        if not name.startswith("relaybox-")
    }


def unreachable(error: Exception, where: str, reason: str) -> Unreachable:
    """Return why no connection to ``where`` could be opened."""
    match error:
        case ssl.SSLError():
            return Unreachable(f"TLS with {where} failed: {reason}")
        case socket.gaierror():
            return Unreachable(f"DNS knows no address of {where}: {reason}")
    return Unreachable(f"cannot connect to {where}: {reason}")


def explain(error: BaseException) -> str:
    """Return a client library's error as the reason of an answer: one line, without secrets."""
    shown = clean(str(error))
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


class Connection(Protocol):
    """A connection to a broker; once broken, it stays broken."""

    @property
    def usable(self) -> bool:
        """True if messages can be sent on it."""
        ...

    async def close(self) -> None:
        """Close it, even if the broker does not answer; it may be closed already."""
        ...


C = TypeVar("C", bound=Connection)


class Shared(Generic[C]):
    """A connection that is opened when it is first needed, and again after it broke.

    ``open`` gets the broken connection, if there is one, and returns the next.
    """

    def __init__(self, open: Callable[[C | None], Coroutine[Any, Any, C]]) -> None:
        self.current: C | None = None
        self._open = open
        self._opening: asyncio.Task[C] | None = None

    async def get(self) -> C:
        """Return the connection; all callers that wait for one wait for the same."""
        current = self.current
        if current is not None and current.usable:
            return current
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(current))
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[C]) -> None:
        if self._opening is opening:
            self._opening = None
            # This reads the exception: asyncio would log it if the callers that waited are gone.
            if not opening.cancelled() and opening.exception() is None:
                self.current = opening.result()

    async def close(self) -> None:
        """Close the connection, also one that is being opened."""
        opening, self._opening = self._opening, None
        current, self.current = self.current, None
        if opening is not None:
            opening.cancel()
            [opened] = await asyncio.gather(opening, return_exceptions=True)
            current = current if isinstance(opened, BaseException) else opened
        if current is not None:
            await current.close()
