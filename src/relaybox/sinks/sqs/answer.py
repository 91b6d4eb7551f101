"""What SQS, SNS and the way to them say of a request, as answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import ClientConnectorError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.sinks.broker import explain
from relaybox.sinks.sink import clean
from relaybox.sinks.sqs.place import Place

_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
# The codes of the services, without what only some of them write: "AWS.SimpleQueueService.", "Exception".
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


class Said(NamedTuple):
    """What was said of a request, or of one message in it."""

    code: str
    message: str
    status: int = 200
    fault_of_sender: bool = False

    @classmethod
    def of_error(cls, error: ClientError) -> Said:
        """Of the whole request."""
        about: dict[str, Any] = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        return cls(str(about.get("Code", "")), str(about.get("Message", "")), status)

    @classmethod
    def of_entry(cls, failed: dict[str, Any]) -> Said:
        """Of one message."""
        return cls(
            str(failed.get("Code")), str(failed.get("Message", "")), 200, failed.get("SenderFault") is True
        )

    @property
    def kind(self) -> str:
        """The code as the sets above have it."""
        return self.code.rpartition(".")[2].removesuffix("Exception")

    @property
    def missing(self) -> bool:
        """Whether there is no such queue or topic."""
        return self.kind in _MISSING

    @property
    def about_place(self) -> bool:
        """Whether no message can help it: credentials, keys, rights, or where it was sent."""
        if self.kind in _BAD_CREDENTIALS or self.kind in _NOT_SO:
            return True
        if self.kind in _CONTENTS and "TopicArn" in self.message:
            return True
        return self.code.lower().startswith("kms") or "Denied" in self.code

    @property
    def about_contents(self) -> bool:
        """Whether a message is refused for what it is, and others beside it perhaps only because of it."""
        return self.kind in _CONTENTS and not self.about_place


def bad_credentials(error: Exception) -> bool:
    """Whether other credentials might do, which may have come in the meantime."""
    if isinstance(error, ClientError):
        return Said.of_error(error).kind in _BAD_CREDENTIALS
    return isinstance(error, _NO_CREDENTIALS)


def answer_to(said: Said, name: str, place: Place) -> Retry | Reject | Unavailable:
    """What becomes of the messages that this was said of."""
    reason = clean(f"{said.code}: {said.message}" if said.message else said.code, place.address.secrets)
    if said.missing:
        return Unavailable(f"there is no {place.what.partition(' ')[2]} {name!r} in {place.region}: {reason}")
    if "throttl" in said.code.lower() or said.kind in _BUSY or said.status == 429:
        return Throttled(reason)
    if said.about_place:
        return Unavailable(reason)
    if said.fault_of_sender or said.about_contents:
        return Reject(reason)
    # As for webhooks: who is asked is not there, not allowed in, or not itself.
    if said.status // 100 == 3 or said.status in (401, 403, 404, 407, 502, 503, 504):
        return Unavailable(reason)
    return Retry(reason)


def explained(error: Exception, name: str, place: Place, timeout: float) -> Retry | Reject | Unavailable:
    """What was raised by a request, as an answer that shows nothing secret."""
    where = place.endpoint or f"{place.service.upper()} in {place.region}"
    match error:
        case ClientError():
            return answer_to(Said.of_error(error), name, place)
        case TimeoutError() | ConnectTimeoutError() | ReadTimeoutError():
            return Unavailable(f"no answer from {where} within {timeout:g}s")
        case _ if isinstance(error, _NO_CREDENTIALS):
            return Unavailable(f"no AWS credentials: {explain(error, place.address)}")
        case SSLError():
            return Unreachable(f"TLS with {where} failed: {_cause(error, place)}")
        case ProxyConnectionError():
            return Unreachable(explain(error, place.address))
        case EndpointConnectionError() if isinstance(error.kwargs.get("error"), ClientConnectorError):
            return Unreachable(f"cannot connect to {where}: {_cause(error, place)}")
        case ConnectionClosedError() | EndpointConnectionError():
            return Unavailable(f"{where} closed the connection before its answer was complete")
    return Retry(explain(error, place.address))


def _cause(error: BotoCoreError, place: Place) -> str:
    return clean(str(error.kwargs.get("error", error)), place.address.secrets)
