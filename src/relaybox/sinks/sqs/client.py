"""Parse ``sqs://`` URLs (see docs/how-to/sqs.md), keep the client, and turn what AWS says into answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from aiohttp import ClientConnectorError
from botocore import exceptions

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.core.values import mask_url, wrong
from relaybox.errors import ConfigError
from relaybox.sinks.broker import Address, Template, explain, parse_address, text
from relaybox.sinks.deadline import no_answer
from relaybox.sinks.sink import being_cancelled, clean

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.fifo)?", re.ASCII)
_LONGEST = {"sqs": 80, "sns": 256}
_ARN = re.compile(r"arn:(aws[a-z-]*):(sqs|sns):([a-z0-9-]+):([0-9]{12}):([^/:]+)", re.ASCII)
_PATH = re.compile(r"(?:([0-9]{12})/)?([^/:]+)", re.ASCII)
_AMAZON = re.compile(r"(?:.+\.)?(?:sqs|sns)\.([a-z0-9-]+)\.(?:vpce\.)?amazonaws\.com(?:\.cn)?", re.ASCII)
_REGION = re.compile(r"[a-z]+(?:-[a-z0-9]+)+", re.ASCII)
_FORMS = "write sqs:///queue, sqs:///account/queue, or the ARN of a queue or topic: sqs:///arn:aws:sns:…"


class Queue(NamedTuple):
    """Where messages go; ``owner`` is the account of a queue, or the ARN of a topic without its name."""

    service: str
    owner: str
    name: Template
    region: str
    endpoint: str | None
    profile: str | None
    address: Address

    def name_of(self, delivery: Delivery) -> str:
        """Return the queue or topic of one event; raise ``Reject`` if the name is not valid."""
        name = self.name(delivery)
        if self.name.fixed is None and not _fits(name, self.service):
            raise Reject(f"{name!r} is not a name of {self.what}: {_rule(self.service)}")
        return name

    @property
    def what(self) -> str:
        """Return the kind of the queue, for messages."""
        return "an SQS queue" if self.service == "sqs" else "an SNS topic"


def parse_queue(destination: Destination) -> Queue:
    """Parse a destination's URL; raise ``ConfigError``."""
    setting = f"destination {destination.name!r}: sink"
    options = {"region": _region, "endpoint": _endpoint, "profile": text}
    address = parse_address(destination, 443, options, host_optional=True)
    profile, region = address.options.get("profile"), address.options.get("region")
    _check_login(address, setting)
    if match := _ARN.fullmatch(address.path):
        partition, service, named, account, name = match.groups()
        if region not in (None, named):
            raise ConfigError(f"{setting} names the region {named!r}, and region is {region!r}; keep one")
        region = named
        owner = account if service == "sqs" else f"arn:{partition}:sns:{named}:{account}:"
    elif match := _PATH.fullmatch(address.path):
        service, owner, name = "sqs", match[1] or "", match[2]
    else:
        raise wrong(setting, mask_url(destination.sink), _FORMS)
    template = Template(name, destination, "name of the queue" if service == "sqs" else "name of the topic")
    if not template.fields and not _fits(name, service):
        raise wrong(setting, name, _rule(service))
    try:
        # Also if the region is known: this checks that the profile exists.
        configured: str | None = AioSession(profile=profile).get_config_variable("region")
    except exceptions.BotoCoreError as error:
        raise ConfigError(f"{setting}: {error}") from None
    amazons = _AMAZON.fullmatch(address.hosts[0][0]) if address.hosts else None
    region = region or (amazons[1] if amazons else configured)
    if not region:
        fix = "write ?region=eu-west-1 into the URL, or set AWS_DEFAULT_REGION"
        raise ConfigError(f"{setting} names no region; {fix}")
    return Queue(service, owner, template, region, _endpoint_of(address, setting), profile, address)


def _fits(name: str, service: str) -> bool:
    return len(name) <= _LONGEST[service] and _NAME.fullmatch(name) is not None


def _rule(service: str) -> str:
    return f"up to {_LONGEST[service]} letters, digits, '-' and '_', and perhaps '.fifo' at the end"


def _region(value: str, setting: str) -> str:
    if not isinstance(value, str) or not _REGION.fullmatch(value):
        raise wrong(setting, value, "write a region such as 'eu-west-1'")
    return value


def _endpoint(value: str, setting: str) -> str:
    fix = "write a URL such as 'http://127.0.0.1:4566', without user and query"
    if not isinstance(value, str) or not re.match(r"https?://[^/?#@]+(/[^?#@]*)?\Z", value):
        raise wrong(setting, mask_url(value) if isinstance(value, str) else value, fix)
    try:
        urlsplit(value).port  # noqa: B018
    except ValueError:
        raise wrong(setting, value, fix) from None
    return value.rstrip("/")


def _check_login(address: Address, setting: str) -> None:
    if bool(address.user) != bool(address.password):
        fix = "write sqs://ACCESS_KEY:SECRET_KEY@/queue, or the secret key in auth, or neither of them"
        raise ConfigError(f"{setting} names one of access key and secret key; {fix}")
    if address.user and "profile" in address.options:
        raise ConfigError(f"{setting} holds an access key, and profile is set too; keep one of them")


def _endpoint_of(address: Address, setting: str) -> str | None:
    endpoint: str | None = address.options.get("endpoint")
    if not address.hosts:
        return endpoint
    if endpoint is not None:
        raise ConfigError(f"{setting} names a host, and endpoint is set too; keep one of them")
    if len(address.hosts) > 1:
        raise ConfigError(f"{setting} names {len(address.hosts)} hosts; write one, or none for Amazon's own")
    [(host, port)] = address.hosts
    shown = f"[{host}]" if ":" in host else host
    return f"https://{shown}" if port == 443 else f"https://{shown}:{port}"


_NO_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.TokenRetrievalError,
    exceptions.UnauthorizedSSOTokenError,
)
# Error codes, without the parts that only some services add: "AWS.SimpleQueueService.", "Exception".
_BAD_CREDENTIALS = frozenset(
    [
        *("ExpiredToken", "RequestExpired", "InvalidClientTokenId", "InvalidAccessKeyId"),
        *("UnrecognizedClient", "SignatureDoesNotMatch", "InvalidSignature", "IncompleteSignature"),
        "MissingAuthenticationToken",
    ]
)
_MISSING = frozenset(["NonExistentQueue", "QueueDoesNotExist", "NotFound"])
_NOT_SO = frozenset(["InvalidAddress", "InvalidSecurity", "UnsupportedOperation", "OptInRequired"])
_BUSY = frozenset(["TooManyRequests", "RequestLimitExceeded", "SlowDown"])
_CONTENTS = frozenset(
    [
        *("BatchRequestTooLong", "MessageTooLong", "InvalidMessageContents", "InvalidAttributeValue"),
        *("InvalidParameterValue", "InvalidParameter", "ParameterValueInvalid"),
        *("ValidationError", "Validation", "MissingParameter", "InvalidParameterCombination"),
    ]
)


class Client:
    """Opens an AWS client, and another after bad credentials: a client never looks for new ones."""

    def __init__(self, queue: Queue, *, connections: int, timeout: float) -> None:
        self._queue = queue
        self._config = AioConfig(
            # The relay decides whether and when to retry.
            retries={"total_max_attempts": 1},
            connect_timeout=timeout,
            read_timeout=timeout,
            max_pool_connections=connections,
        )
        self._making = asyncio.Lock()
        self._current: _Opened | None = None

    async def ask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Run ``work``, one request, with the client and return its result."""
        async with self._making:
            if self._current is None:
                self._current = await self._open()
            opened = self._current
        task = asyncio.ensure_future(work(opened.client))
        opened.under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Retry("the sink was closed before the answer came") from None
        except Exception as error:
            if bad_credentials(error) and opened is self._current:
                self._current = None
            raise
        finally:
            opened.under_way.discard(task)
            if opened is not self._current and not opened.under_way:
                await opened.stack.aclose()

    async def close(self) -> None:
        """Close all connections, including those in use or being opened."""
        async with self._making:
            opened, self._current = self._current, None
        if opened is None:
            return
        # A request that has no connection yet would open a new one.
        for task in opened.under_way:
            task.cancel()
        await asyncio.gather(*opened.under_way, return_exceptions=True)
        await opened.stack.aclose()

    async def _open(self) -> _Opened:
        queue = self._queue
        stack = AsyncExitStack()
        making = AioSession(profile=queue.profile).create_client(
            queue.service,
            region_name=queue.region,
            endpoint_url=queue.endpoint,
            aws_access_key_id=queue.address.user,
            aws_secret_access_key=queue.address.password,
            config=self._config,
        )
        return _Opened(await stack.enter_async_context(making), stack)


class _Opened:
    def __init__(self, client: Any, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack
        self.under_way: set[asyncio.Task[Any]] = set()


class Said(NamedTuple):
    """The error of a request, or of one message in it."""

    code: str
    message: str
    status: int = 200
    fault_of_sender: bool = False

    @classmethod
    def of_error(cls, error: exceptions.ClientError) -> Said:
        """Return the error of a whole request."""
        about: dict[str, Any] = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        return cls(str(about.get("Code", "")), str(about.get("Message", "")), status)

    @property
    def kind(self) -> str:
        """Return the code as written in the sets above."""
        return self.code.rpartition(".")[2].removesuffix("Exception")

    @property
    def missing(self) -> bool:
        """True if the queue or topic does not exist."""
        return self.kind in _MISSING

    @property
    def about_queue(self) -> bool:
        """True if every message would be refused: credentials, keys, permissions or the address are wrong."""
        if self.kind in _BAD_CREDENTIALS or self.kind in _NOT_SO:
            return True
        if self.kind in _CONTENTS and "TopicArn" in self.message:
            return True
        return self.code.lower().startswith("kms") or "Denied" in self.code

    @property
    def about_contents(self) -> bool:
        """True if a message is refused for its content; other messages of the request may be fine."""
        return self.kind in _CONTENTS and not self.about_queue


def bad_credentials(error: Exception) -> bool:
    """True if new credentials, which may exist by now, could help."""
    if isinstance(error, exceptions.ClientError):
        return Said.of_error(error).kind in _BAD_CREDENTIALS
    return isinstance(error, _NO_CREDENTIALS)


def answer_to(said: Said, name: str, queue: Queue) -> Retry | Reject | Unavailable:
    """Return the answer to the messages that an error is about."""
    reason = clean(f"{said.code}: {said.message}" if said.message else said.code)
    if said.missing:
        return Unavailable(f"there is no {queue.what.partition(' ')[2]} {name!r} in {queue.region}: {reason}")
    if "throttl" in said.code.lower() or said.kind in _BUSY or said.status == 429:
        return Throttled(reason)
    if said.about_queue:
        return Unavailable(reason)
    if said.fault_of_sender or said.about_contents:
        return Reject(reason)
    # As for webhooks: the endpoint is missing, denies access, or is not the real service.
    if said.status // 100 == 3 or said.status in (401, 403, 404, 407, 502, 503, 504):
        return Unavailable(reason)
    return Retry(reason)


def explained(error: Exception, name: str, queue: Queue, timeout: float) -> Retry | Reject | Unavailable:
    """Return the answer for an exception of a request, without secrets."""
    where = queue.endpoint or f"{queue.service.upper()} in {queue.region}"
    match error:
        case exceptions.ClientError():
            return answer_to(Said.of_error(error), name, queue)
        case TimeoutError() | exceptions.ConnectTimeoutError() | exceptions.ReadTimeoutError():
            return no_answer(where, timeout)
        case _ if isinstance(error, _NO_CREDENTIALS):
            return Unavailable(f"no AWS credentials: {explain(error)}")
        case exceptions.SSLError():
            return Unreachable(f"TLS with {where} failed: {_cause(error)}")
        case exceptions.ProxyConnectionError():
            return Unreachable(explain(error))
        case exceptions.EndpointConnectionError() if isinstance(
            error.kwargs.get("error"), ClientConnectorError
        ):
            return Unreachable(f"cannot connect to {where}: {_cause(error)}")
        case exceptions.ConnectionClosedError() | exceptions.EndpointConnectionError():
            return Unavailable(f"{where} closed the connection before its answer was complete")
    return Retry(explain(error))


def _cause(error: exceptions.BotoCoreError) -> str:
    return clean(str(error.kwargs.get("error", error)))
