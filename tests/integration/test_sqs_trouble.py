"""Queues that are missing, wrong credentials, a service that is in trouble, and URLs that name no place."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from relaybox import Destination
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.sinks.open import open_sink
from relaybox.sinks.sink import Answer
from relaybox.sinks.sqs.sink import SqsSink
from relaybox.testing.sink_contract import make_delivery, type_of
from tests.conftest import available
from tests.integration.amazon import Amazon, amazon, sink_at  # noqa: F401
from tests.integration.outages import checked
from tests.integration.receivers import Receiver, answer, doing, listening, read_request
from tests.integration.sinking import PATIENT, check_refused, send, sink_to
from tests.servers import moto
from tests.waiting import PATIENCE, cancel

pytestmark = pytest.mark.full

# ruff: noqa: F811

AWS = "sqs.eu-west-1.amazonaws.com"


@pytest.fixture(autouse=True)
def nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the credentials and the region of the person who runs the tests."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def refusal(kind: str, status: str = "400 Bad Request") -> bytes:
    body = json.dumps({"__type": f"com.amazonaws.sqs#{kind}", "message": f"it is {kind}"}).encode()
    return answer(status, body, "content-type: application/x-amz-json-1.0")


async def test_a_queue_that_is_missing_is_named_and_takes_messages_when_it_is_made(amazon: Amazon) -> None:
    async with sink_to(amazon.sink("{tenant}-later")) as sink:
        tenant = uuid4().hex
        delivery = make_delivery(headers=json.dumps({"tenant": tenant}))
        check_refused((await sink.send([delivery]))[0], Unavailable, f"no SQS queue '{tenant}-later' in eu-")
        queue = amazon.queue(name=f"{tenant}-later")
        assert await sink.send([delivery]) == [Delivered()]
        amazon.sqs.delete_queue(QueueUrl=queue.url)
        [gone] = await sink.send([delivery])
        check_refused(gone, Unavailable, f"no SQS queue '{tenant}-later'")


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (refusal("RequestThrottled"), Throttled, "it is RequestThrottled"),
        (refusal("ThrottlingException", "429 Too Many Requests"), Throttled, "Throttling"),
        (refusal("InvalidClientTokenId", "403 Forbidden"), Unavailable, "InvalidClientTokenId"),
        (refusal("ExpiredTokenException", "400 Bad Request"), Unavailable, "ExpiredToken"),
        (refusal("KmsDisabled"), Unavailable, "KmsDisabled"),
        (refusal("InvalidAddress"), Unavailable, "InvalidAddress"),
        (refusal("AccessDeniedException"), Unavailable, "AccessDenied"),
        (refusal("ServiceUnavailable", "503 Service Unavailable"), Unavailable, "ServiceUnavailable"),
        (refusal("InternalFailure", "500 Internal Server Error"), Retry, "InternalFailure"),
        (refusal("InvalidMessageContents"), Reject, "InvalidMessageContents"),
        (answer("200 OK", b"<html>"), Retry, ""),
        (b"", Unavailable, "closed the connection"),
    ],
)
async def test_the_errors_of_the_service_are_distinguished(
    said: bytes, kind: type[Answer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)

    async with doing(act) as service:
        [answered] = await send(sink_at(f"http://127.0.0.1:{service.port}", "orders"), make_delivery())
    assert type(answered) is kind, answered
    assert reason in str(answered)
    assert "geheim" not in str(answered) + caplog.text


async def test_a_request_that_is_refused_for_one_message_is_halved_until_it_is_found() -> None:
    bad = make_delivery()
    asked: list[int] = []

    def say(body: bytes) -> bytes:
        request = json.loads(body)
        if "Entries" not in request:
            return answer("200 OK", json.dumps({"QueueUrl": "http://127.0.0.1/1/orders"}).encode())
        asked.append(len(request["Entries"]))
        if str(bad.event_id).encode() in body:
            return refusal("InvalidParameterValue")
        sent = [{"Id": entry["Id"], "MessageId": "1"} for entry in request["Entries"]]
        return answer("200 OK", json.dumps({"Successful": sent}).encode())

    async def talk(service: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(say((await read_request(reader)).body))

    async with listening(talk) as service:
        sink = sink_at(f"http://127.0.0.1:{service.port}", "orders")
        batch = [make_delivery() for _ in range(10)]
        batch[6] = bad
        answers = await send(sink, *batch)
    assert [type_of(one) for one in answers] == [*[Delivered] * 6, Reject, *[Delivered] * 3]
    assert asked == [10, 5, 5, 2, 1, 1, 3]


async def test_wrong_credentials_are_the_destinations_trouble_and_new_ones_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with available("moto", moto.server()) as endpoint, closing(Amazon(endpoint)) as own:
        url = f"sqs:///{own.queue().name}?region=eu-west-1&endpoint={endpoint}"
        async with sink_to(url) as sink:
            [none] = await sink.send([make_delivery()])
            check_refused(none, Unavailable, "no AWS credentials")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
            _check_after(0, endpoint)
            [wrong] = await sink.send([make_delivery()])
            check_refused(wrong, Unavailable, "InvalidClientTokenId")
            _check_after(1000, endpoint)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
            assert await sink.send([make_delivery(), make_delivery()]) == [Delivered()] * 2


def _check_after(requests: int, endpoint: str) -> None:
    """Have a server look at credentials, of which it knows none, after so many requests."""
    url, headers = f"{endpoint}/moto-api/reset-auth", {"content-type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, b"%d" % requests, headers)).close()


async def test_a_profile_has_credentials_and_a_region(amazon: Amazon, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[profile shop]\nregion = eu-west-1\n")
    (tmp_path / "credentials").write_text("[shop]\naws_access_key_id = a\naws_secret_access_key = b\n")
    sink = f"sqs:///{amazon.queue().name}?profile=shop&endpoint={amazon.endpoint}"
    assert await send(sink, make_delivery()) == [Delivered()]


async def test_nobody_there_is_unreachable(amazon: Amazon) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for endpoint, reason in {
            f"http://127.0.0.1:{free.getsockname()[1]}": "cannot connect",
            "http://nowhere.invalid": "cannot connect",
            amazon.endpoint.replace("http:", "https:"): "TLS",
        }.items():
            [gone] = await send(sink_at(endpoint, "orders"), make_delivery())
            check_refused(gone, Unreachable, reason)


@asynccontextmanager
async def unanswered(
    *deliveries: Delivery, **settings: Any
) -> AsyncIterator[tuple[Any, asyncio.Future[Any]]]:
    """Open a sink and a send to a service that does not answer; it is connected, unless it gave up before."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = sink_at(f"http://127.0.0.1:{silent.getsockname()[1]}", "orders")
        async with sink_to(url, **settings) as sink, asyncio.TaskGroup() as group:
            sending = asyncio.ensure_future(sink.send(deliveries))
            accepting = group.create_task(asyncio.get_running_loop().sock_accept(silent))
            await asyncio.wait((accepting, sending), return_when=asyncio.FIRST_COMPLETED)
            yield sink, sending
            accepting.cancel()
        if not accepting.cancelled():
            accepting.result()[0].close()


async def test_a_service_that_says_nothing_is_given_up_in_time() -> None:
    async with unanswered(make_delivery(), make_delivery(), timeout=0.2) as (_, sending):
        answers = await asyncio.wait_for(sending, PATIENCE)
    assert [type(one) for one in answers] == [Unavailable] * 2
    assert "no answer" in str(answers[0])


async def test_a_sink_that_is_closed_gives_up_what_is_not_answered() -> None:
    async with unanswered(make_delivery(), **PATIENT) as (sink, sending), asyncio.timeout(PATIENCE):
        await sink.close()
        [closed] = await sending
    assert isinstance(closed, Retry | Unavailable)


async def test_a_send_that_is_cancelled_ends() -> None:
    async with unanswered(make_delivery(key="a"), make_delivery(key="a"), **PATIENT) as (_, sending):
        await cancel(sending)


async def test_a_check_reaches_the_queue_or_says_why_not(amazon: Amazon) -> None:
    queue, (arn, _) = amazon.queue(), amazon.topic()
    for path in (queue.name, "{tenant}-events", arn, f"{arn}-{{tenant}}"):
        assert await checked(amazon.sink(path)) == "fine"
    for path, endpoint, reason in [
        ("missing", amazon.endpoint, "no SQS queue 'missing'"),
        (f"{arn}-x", amazon.endpoint, "no SNS topic"),
        (queue.name, "http://127.0.0.1:1", "cannot connect"),
    ]:
        assert reason in await checked(sink_at(endpoint, path))


@pytest.mark.parametrize(
    ("sink", "options", "reason"),
    [
        ("sqs:///orders", {}, "names no region; write .region="),
        ("sqs:///?region=eu-west-1", {}, "sqs:///queue"),
        ("sqs://orders?region=eu-west-1", {}, "sqs:///queue"),
        ("sqs:///a/b?region=eu-west-1", {}, "sqs:///queue"),
        ("sqs:///a b?region=eu-west-1", {}, "up to 80 letters"),
        (f"sqs:///{'a' * 81}?region=eu-west-1", {}, "up to 80 letters"),
        ("sqs:///{tenat}?region=eu-west-1", {}, "did you mean 'tenant'"),
        ("sqs:///o?regoin=eu-west-1", {}, "did you mean 'region'"),
        ("sqs:///o?region=Ireland", {}, "write a region such as"),
        ("sqs:///o", {"options": {"region": 1}}, "write a region such as"),
        ("sqs:///o?region=eu-west-1&profile=nobody", {}, "nobody"),
        ("sqs:///o?region=eu-west-1&endpoint=127.0.0.1:5000", {}, "write a URL such as"),
        ("sqs:///o?region=eu-west-1&endpoint=http://a:geheim@h/", {}, "without user"),
        ("sqs:///o?region=eu-west-1&endpoint=http://h:port", {}, "write a URL such as"),
        ("sqs://h/o?region=eu-west-1&endpoint=http://h", {}, "keep one"),
        ("sqs://h,i/o?region=eu-west-1", {}, "2 hosts"),
        ("sqs://AKIA@/o?region=eu-west-1", {}, "one of access key and secret key"),
        ("sqs:///o?region=eu-west-1", {"auth": "geheim"}, "one of access key and secret key"),
        ("sqs://AKIA:geheim@/o?region=eu-west-1&profile=default", {}, "keep one"),
        ("sqs:///arn:aws:sns:eu-west-1:123456789012:o?region=us-east-1", {}, "keep one"),
        ("sqs:///arn:aws:s3:eu-west-1:123456789012:o", {}, "the ARN of a queue or topic"),
    ],
)
def test_a_url_that_is_wrong_is_an_error_that_shows_no_secret(
    sink: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        open_sink(Destination("shop", sink, **options), {})
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize(
    ("sink", "region", "endpoint"),
    [
        (f"sqs://{AWS}/123456789012/o", "eu-west-1", f"https://{AWS}"),
        ("sqs://localhost:4566/o?region=eu-west-1", "eu-west-1", "https://localhost:4566"),
        ("sqs://[::1]/o?region=eu-west-1", "eu-west-1", "https://[::1]"),
        ("sqs:///arn:aws-cn:sns:cn-north-1:123456789012:o", "cn-north-1", None),
        ("sqs:///{tenant}.fifo?region=eu-west-1", "eu-west-1", None),
    ],
)
def test_a_url_says_where(sink: str, region: str, endpoint: str | None) -> None:
    opened = open_sink(Destination("shop", sink), {})
    assert isinstance(opened, SqsSink)
    assert (opened._queue.region, opened._queue.endpoint) == (region, endpoint)
