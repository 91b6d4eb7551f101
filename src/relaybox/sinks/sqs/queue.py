"""Where the messages of an ``sqs://`` destination go: a queue or a topic, whose name may be a template.

| URL | means |
|---|---|
| ``sqs:///orders?region=eu-west-1`` | a queue of the account that the credentials belong to |
| ``sqs:///123456789012/orders?region=eu-west-1`` | a queue of that account |
| ``sqs://sqs.eu-west-1.amazonaws.com/123456789012/orders`` | the same: the queue's URL with another scheme |
| ``sqs:///arn:aws:sqs:eu-west-1:123456789012:orders`` | the same, by its ARN |
| ``sqs:///arn:aws:sns:eu-west-1:123456789012:orders`` | a topic of SNS |
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.core.values import mask_url, wrong
from relaybox.errors import ConfigError
from relaybox.sinks.broker import Address, Template, parse_address, text

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.fifo)?", re.ASCII)
_LONGEST = {"sqs": 80, "sns": 256}
_ARN = re.compile(r"arn:(aws[a-z-]*):(sqs|sns):([a-z0-9-]+):([0-9]{12}):([^/:]+)", re.ASCII)
_PATH = re.compile(r"(?:([0-9]{12})/)?([^/:]+)", re.ASCII)
_AMAZON = re.compile(r"(?:.+\.)?(?:sqs|sns)\.([a-z0-9-]+)\.(?:vpce\.)?amazonaws\.com(?:\.cn)?", re.ASCII)
_REGION = re.compile(r"[a-z]+(?:-[a-z0-9]+)+", re.ASCII)
_FORMS = "write sqs:///queue, sqs:///account/queue, or the ARN of a queue or topic: sqs:///arn:aws:sns:…"


class Queue(NamedTuple):
    """Where messages go, and as whom.

    ``owner`` is the account of a queue, or the ARN of a topic up to its name. ``fixed`` is the name where it
    is the same for all events.
    """

    service: str
    owner: str
    name: Template
    fixed: str | None
    region: str
    endpoint: str | None
    profile: str | None
    address: Address

    def name_of(self, delivery: Delivery) -> str:
        """The queue or topic of one event; raises ``Reject`` where it makes no name."""
        name = self.name(delivery)
        if self.fixed is None and not _fits(name, self.service):
            raise Reject(f"{name!r} is no name of {self.what}: {_rule(self.service)}")
        return name

    @property
    def what(self) -> str:
        """What it is that has the name."""
        return "an SQS queue" if self.service == "sqs" else "an SNS topic"


def parse_queue(destination: Destination) -> Queue:
    """What a destination's URL names; raises ``ConfigError``."""
    setting = f"destination {destination.name!r}: sink"
    options = {"region": _region, "endpoint": _endpoint, "profile": text}
    address = parse_address(destination, 443, options, hostless=True)
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
    configured = _configured_region(profile, setting)
    region = region or _region_of(address) or configured
    if not region:
        fix = "write ?region=eu-west-1 into the URL, or set AWS_DEFAULT_REGION"
        raise ConfigError(f"{setting} names no region; {fix}")
    fixed = None if template.fields else name
    return Queue(service, owner, template, fixed, region, _endpoint_of(address, setting), profile, address)


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


def _region_of(address: Address) -> str | None:
    match = _AMAZON.fullmatch(address.hosts[0][0]) if address.hosts else None
    return match[1] if match else None


def _configured_region(profile: str | None, setting: str) -> str | None:
    """The region that the environment or the profile names, which has to be there."""
    try:
        region: str | None = AioSession(profile=profile).get_config_variable("region")
    except BotoCoreError as error:
        raise ConfigError(f"{setting}: {error}") from None
    return region
