"""Events as messages in a real stream of NATS, a server that refuses, and one that goes away."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import nkeys
import pytest
from nats.js.api import DiscardPolicy

from relaybox import Destination
from relaybox.core.outcome import Delivered, Reject, Throttled, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.sinks.nats import connection as nats_connection
from relaybox.sinks.nats.sink import LONGEST_SUBJECT, NatsSink
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration import outages
from tests.integration.jetstream import Place, connect, jetstream, read, stream
from tests.integration.sinking import PATIENT, altered, check_refused, deliver, send, sink_to
from tests.integration.test_http_exchange import certificate
from tests.servers import base
from tests.servers import nats as server
from tests.waiting import PATIENCE

HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
LIMITS = "subs data payload imports exports conn leaf streams consumer mem_storage disk_storage"
NO_LIMITS = {**dict.fromkeys(LIMITS.split(), -1), "wildcards": True}
CREDS = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


@pytest.fixture
async def place(nats_url: str) -> AsyncIterator[Place]:
    async with stream(nats_url) as place:
        yield place


async def test_an_event_is_a_message_with_its_headers(place: Place) -> None:
    delivery = make_delivery('{"total": 42}', headers='{"tenant": "acme", "of": 7, "note": "grün"}')
    assert await send(place.url, delivery) == [Delivered()]
    [message] = await place.messages()
    assert message.subject == f"{place.name}.order.paid"
    assert json.loads(message.data)["data"] == {"total": 42}
    assert message.headers == {
        "Nats-Msg-Id": str(delivery.event_id),
        "event-id": str(delivery.event_id),
        "event-type": "order.paid",
        "aggregate-type": "Order",
        "aggregate-id": "1",
        "content-type": "application/json",
        "tenant": "acme",
        "of": "7",
        "note": "grün",
    }


async def test_the_subject_is_made_of_the_event_and_the_bare_payload_of_bytes_is_the_body(
    nats_url: str, place: Place
) -> None:
    url = f"{nats_url}/{place.name}.{{tenant}}.{{aggregate_type}}.{{aggregate_id}}"
    delivery = make_delivery(data=b"\xff\x00", headers='{"tenant": "acme"}')
    assert await send(url, delivery, format="payload") == [Delivered()]
    [message] = await place.messages()
    assert (message.subject, message.data) == (f"{place.name}.acme.Order.1", b"\xff\x00")


async def test_what_arrives_twice_is_stored_once_and_delivered(place: Place) -> None:
    delivery = make_delivery()
    again = msgspec.structs.replace(delivery, attempts=2)
    assert await send(place.url, delivery, again) == [Delivered()] * 2
    assert len(await place.messages()) == 1


async def test_two_destinations_may_put_an_event_into_one_stream_under_two_subjects(
    nats_url: str, place: Place
) -> None:
    delivery = make_delivery()
    other = msgspec.structs.replace(delivery, id=uuid4())
    assert await send(f"{nats_url}/{place.name}.a", delivery) == [Delivered()]
    for _ in range(2):
        assert await send(f"{nats_url}/{place.name}.b", other) == [Delivered()]
    messages = await place.messages()
    assert [message.subject for message in messages] == [f"{place.name}.a", f"{place.name}.b"]
    assert [message.headers["event-id"] for message in messages] == [str(delivery.event_id)] * 2


@pytest.mark.parametrize("mark", ["relaybox-replay", "relaybox-dead-letter-from"])
async def test_a_copy_that_was_asked_for_is_not_a_duplicate(place: Place, mark: str) -> None:
    first = make_delivery()
    copy = msgspec.structs.replace(first, id=uuid4(), headers=json.dumps({mark: "shop"}))
    assert await send(place.url, first, copy, copy) == [Delivered()] * 3
    assert [message.headers["event-id"] for message in await place.messages()] == [str(first.event_id)] * 2


@pytest.mark.parametrize(
    "value",
    [
        *("", "a b", "a\tb", "a\r\nPUB x 0\r\n", "a\u2003b", "a\x00", "\x7f"),
        *("*", "a*", ">", "a.>", ".a", "a.", "a..b"),
    ],
)
async def test_what_makes_no_subject_is_rejected_and_says_so(place: Place, nats_url: str, value: str) -> None:
    bad = altered(aggregate_id=value)
    [rejected, passed] = await send(f"{nats_url}/{place.name}.{{aggregate_id}}", bad, make_delivery())
    check_refused(rejected, Reject, "is not a subject")
    assert passed == Delivered()
    assert len(await place.messages()) == 1


async def test_no_event_leads_to_the_servers_own_subjects(nats_url: str, place: Place) -> None:
    bad = altered(aggregate_type="$JS", event_type=f"API.STREAM.DELETE.{place.name}")
    [answer] = await send(nats_url, bad)
    check_refused(answer, Reject, "reserved for the server")
    assert await place.messages() == []


async def test_a_subject_has_a_length(nats_url: str, place: Place) -> None:
    url = f"{nats_url}/{place.name}.{{tenant}}"
    room = LONGEST_SUBJECT - len(place.name) - 1
    fits, over = (make_delivery(headers=json.dumps({"tenant": "x" * size})) for size in (room, room + 1))
    [passed, rejected] = await send(url, fits, over)
    assert passed == Delivered()
    check_refused(rejected, Reject, f"the limit is {LONGEST_SUBJECT}")


@pytest.mark.parametrize("header", ["a b", "a:b", "größe", "", "a\r\nb", "Nats-Rollup", "nats-msg-id"])
async def test_a_header_that_nats_does_not_take_is_rejected_by_name(place: Place, header: str) -> None:
    bad, good = make_delivery(headers=json.dumps({header: "all"})), make_delivery()
    [rejected, passed] = await send(place.url, bad, good)
    check_refused(rejected, Reject, repr(header))
    assert passed == Delivered()


async def test_without_a_stream_it_is_unavailable_and_names_the_subject(nats_url: str) -> None:
    name = f"s{uuid4().hex}"
    async with sink_to(f"{nats_url}/{name}") as sink, await connect(nats_url) as client:
        [answer] = await sink.send([make_delivery()])
        check_refused(answer, Unavailable, f"takes the subject '{name}'")
        await jetstream(client).add_stream(name=name, subjects=[name])
        assert await sink.send([make_delivery()]) == [Delivered()]
        await jetstream(client).delete_stream(name)


async def test_an_answer_that_is_not_from_a_stream_is_not_an_acknowledgement(nats_url: str) -> None:
    subject = f"s{uuid4().hex}"
    async with await connect(nats_url) as client:

        async def answer(message: Any) -> None:
            await message.respond(b"thank you")

        await client.subscribe(subject, cb=answer)
        await client.flush()
        [said] = await send(f"{nats_url}/{subject}", make_delivery())
    check_refused(said, Unavailable, "is not a stream")


async def test_the_largest_message_passes_and_one_byte_more_is_rejected_with_the_limit(place: Place) -> None:
    limit = place.client.max_payload
    probe = make_delivery(data=b"")
    async with sink_to(place.url, format="payload") as sink:
        assert await sink.send([probe]) == [Delivered()]
        [stored] = await place.messages()
        room = limit - 12 - sum(len(name) + len(value) + 4 for name, value in stored.headers.items())
        fits, over = make_delivery(data=b"x" * room), make_delivery(data=b"x" * (room + 1))
        [passed, rejected, other] = await sink.send([fits, over, make_delivery()])
    assert (passed, other) == (Delivered(), Delivered())
    check_refused(rejected, Reject, f"max_payload is {limit}")


async def test_a_message_over_the_streams_limit_is_rejected_with_the_limit(nats_url: str) -> None:
    async with stream(nats_url, max_msg_size=2000) as place:
        large, small = make_delivery(data=b"x" * 2000), make_delivery()
        [rejected, passed] = await send(place.url, large, small)
    check_refused(rejected, Reject, "max_msg_size", "is 2000")
    assert passed == Delivered()


@pytest.mark.parametrize(
    ("note", "reason"),
    [("a\r\nb: c", "'note' has a line break"), ("x" * 70_000, "64k")],
    ids=["line", "long"],
)
async def test_a_header_that_has_a_line_break_or_is_too_long_is_rejected(
    place: Place, note: str, reason: str
) -> None:
    [answer] = await send(place.url, make_delivery(headers=json.dumps({"note": note})))
    check_refused(answer, Reject, reason)


async def test_a_stream_that_is_full_takes_more_when_there_is_room(nats_url: str) -> None:
    async with stream(nats_url, max_msgs=1, discard=DiscardPolicy.NEW) as place, sink_to(place.url) as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        [full] = await sink.send([make_delivery()])
        check_refused(full, Throttled, "maximum messages exceeded")
        await jetstream(place.client).purge_stream(place.name)
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_what_another_stream_would_take_is_not_given_to_it(nats_url: str, place: Place) -> None:
    [answer] = await send(place.url, make_delivery(), options={"stream": "orders"})
    check_refused(answer, Unavailable, "'orders'")
    assert await place.messages() == []
    assert await send(place.url, make_delivery(), options={"stream": place.name}) == [Delivered()]


@pytest.mark.parametrize(
    ("rules", "login", "settings"),
    [
        ('user: "shop", password: "s3cret word"', "shop:s3cret%20word", {}),
        ('user: "shop", password: "s3cret word"', "shop", {"auth": "s3cret word"}),
        ('token: "s3cret word"', "s3cret%20word", {}),
        ('token: "s3cret word"', "", {"auth": "s3cret word"}),
    ],
)
async def test_credentials_are_checked_and_never_shown(
    rules: str, login: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with available("NATS", server.broker(f"authorization {{ {rules} }}")) as started:
        url = server.url_of(started)
        async with sink_to(f"{server.url_of(started, login)}/orders", **settings) as sink:
            [answer] = await sink.send([make_delivery()])
            check_refused(answer, Unavailable, "no stream")
            assert "s3cret" not in f"{answer}{sink!r}"
        for wrong in ("shop:wr0ng", "wr0ng"):
            [refused] = await send(f"{url.replace('//', f'//{wrong}@')}/orders", make_delivery())
            check_refused(refused, Unavailable, "refuses the credentials")
            assert "wr0ng" not in refused.reason
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_subject_that_is_not_permitted_is_answered_at_once_and_holds_up_no_other() -> None:
    allowed = '{publish: ["Order.ok", "$JS.API.STREAM.CREATE.>"], subscribe: "_INBOX.>"}'
    user = f"{{user: a, password: b, permissions: {allowed}}}"
    with available("NATS", server.broker(f"authorization {{ users: [{user}] }}")) as started:
        url = server.url_of(started, "a:b")
        async with await connect(url) as client, sink_to(url, **PATIENT) as sink:
            await jetstream(client).add_stream(name="orders", subjects=["Order.>"])
            good = altered(event_type="ok")
            [refused, passed] = await asyncio.wait_for(sink.send([make_delivery(), good]), PATIENCE)
            # It may not look at what the stream has, and takes its word for a duplicate.
            assert await sink.send([good]) == [Delivered()]
    check_refused(refused, Unavailable, "permissions violation")
    assert passed == Delivered()


@contextmanager
def over_tls(more: str = "") -> Iterator[tuple[str, str]]:
    """Yield the URL of a server that has a certificate, and the file of that."""
    with base.workspace() as directory:
        file = str(certificate(directory / "server.pem"))
        tls = f'tls {{ cert_file: "{file}", key_file: "{file}", ca_file: "{file}" {more} }}'
        with available("NATS", server.broker(tls)) as started:
            yield f"{server.url_of(started)}/orders", file


async def test_tls_is_verified_and_insisted_on(nats_url: str) -> None:
    with over_tls() as (url, file):
        [trusted] = await send(url, make_delivery(), options={"ca": file})
        [unknown] = await send(url, make_delivery())
    check_refused(trusted, Unavailable, "no stream")
    check_refused(unknown, Unreachable, "TLS with")
    [plain] = await send(f"{nats_url}/orders", make_delivery(), options={"tls": True})
    check_refused(plain, Unavailable, "does not offer TLS")


async def test_a_server_may_ask_for_a_certificate() -> None:
    with over_tls(", verify: true") as (url, file):
        own = {"ca": file, "certificate": file, "key": file}
        [known] = await send(url, make_delivery(), options=own)
        [unknown] = await send(url, make_delivery(), options={"ca": file}, timeout="3s")
    check_refused(known, Unavailable, "no stream")
    check_refused(unknown, Unavailable)
    assert "no stream" not in unknown.reason


class Key:
    """A pair of keys, whose public one is a name."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.name: str = self._pair.public_key.decode()

    def vouch(self, subject: Key, kind: str, **claims: Any) -> str:
        """Return a token that says who the subject is."""
        token = {"jti": secrets.token_hex(16), "iat": int(time.time()), "iss": self.name, "sub": subject.name}
        token["nats"] = {"type": kind, "version": 2, **claims}
        text = f"{_encoded(HEADER)}.{_encoded(token)}"
        return f"{text}.{urlsafe_b64encode(self._pair.sign(text.encode())).decode().rstrip('=')}"


def _encoded(value: Any) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def make_operator(directory: Path) -> tuple[str, Path]:
    """Return the configuration of a server that trusts a new operator, and the file of a user of it."""
    operator, user = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_USER)
    account, system = Key(nkeys.PREFIX_BYTE_ACCOUNT), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    configuration = f"""
        operator: "{operator.vouch(operator, "operator")}"
        system_account: "{system.name}"
        resolver: MEMORY
        resolver_preload: {{
            {account.name}: "{operator.vouch(account, "account", limits=NO_LIMITS)}"
            {system.name}: "{operator.vouch(system, "account")}"
        }}
    """
    token = account.vouch(user, "user", pub={}, sub={}, subs=-1, data=-1, payload=-1)
    creds = directory / f"{user.name}.creds"
    creds.write_text(CREDS.format(token=token, seed=user.seed.decode()))
    return configuration, creds


async def test_a_user_may_have_credentials_of_an_operator(tmp_path: Path) -> None:
    configuration, creds = make_operator(tmp_path)
    _, unknown = make_operator(tmp_path)
    with available("NATS", server.broker(configuration)) as started:
        url = server.url_of(started)
        async with await connect(url, user_credentials=str(creds)) as client:
            await jetstream(client).add_stream(name="orders", subjects=["Order.>"])
        assert await send(url, make_delivery(), options={"creds": str(creds)}) == [Delivered()]
        [refused] = await send(url, make_delivery(), options={"creds": str(unknown)})
    check_refused(refused, Unavailable, "refuses the credentials")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nats://h/a.>", {}, "wildcards"),
        ("nats://h/a..b", {}, "empty parts"),
        ("nats://h/{order}.a", {}, "names 'order'"),
        ("nats://h/a?steram=x", {}, "did you mean 'stream'"),
        ("nats://h/a?stream=", {}, "write a text"),
        ("nats://h:x/a", {}, "host:port"),
        ("nats://h/a", {"key": "x"}, "without certificate"),
        ("nats://h/a", {"ca": "/nowhere"}, "cannot be read"),
        ("nats://h/a", {"creds": "/nowhere"}, "creds"),
        ("nats://h/a?tls=yes", {}, "true or false"),
    ],
)
def test_wrong_settings_are_reported(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NatsSink(Destination("shop", url, options=options))


class NatsPlace(outages.Place):
    """A stream that drops what reaches it twice."""

    scheme = "nats"
    silence = "no acknowledgement"

    @property
    def url(self) -> str:
        return server.url_of(self.server)

    async def declare(self) -> None:
        async with await connect(self.url) as client:
            await jetstream(client).add_stream(name="orders", subjects=["Order.>"])

    async def entries(self) -> list[outages.Entry]:
        async with await connect(self.url) as client:
            messages = await read(client, "orders", "Order.>")
        for message in messages:
            assert message.subject == "Order.order.paid"
            assert message.headers["Nats-Msg-Id"] == message.headers["event-id"]
        return [(message.headers, message.data) for message in messages]


class TestNatsOutages(outages.OutageContract):
    @pytest.fixture
    def place(self) -> Iterator[NatsPlace]:
        """Run a server that a test may stop."""
        with available("NATS", server.broker()) as started:
            yield NatsPlace(started)

    @pytest.mark.parametrize("size", [1, 500_000])
    async def test_a_connection_on_which_nothing_is_heard_is_given_up_for_a_new_one(
        self, place: NatsPlace, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.1)
        await place.declare()
        async with sink_to(place.url, timeout="2s") as sink:
            await deliver(sink)
            first = sink._shared.current
            with place.server.silent():
                answers = await sink.send([make_delivery(data=b"x" * size) for _ in range(20)])
                assert {type(answer) for answer in answers} == {Unavailable}
            await deliver(sink)
            assert sink._shared.current is not first

    async def test_of_several_hosts_one_that_is_there_is_enough(self, place: NatsPlace) -> None:
        await place.declare()
        for _ in range(4):
            [answer] = await send(f"nats://127.0.0.1:1,127.0.0.1:{place.server.port}", make_delivery())
            assert answer == Delivered()

    async def test_the_check_says_which_stream_is_missing(self, place: NatsPlace) -> None:
        async with stream(place.url) as made:
            assert await outages.checked(place.url, options={"stream": made.name}) == "fine"
            assert await outages.checked(f"{place.url}/{made.name}.paid") == "fine"
            assert "no stream 'orders'" in await outages.checked(place.url, options={"stream": "orders"})
            assert "no stream for 'orders'" in await outages.checked(f"{place.url}/orders")

    async def test_a_missing_stream_is_reported_and_holds_up_no_other_destination(
        self, place: NatsPlace, database: str
    ) -> None:
        trouble = f"no stream of 127.0.0.1:{place.server.port} takes the subject 'Order.order.paid'"
        await outages.untroubled(database, place.url, trouble, place.declare)
