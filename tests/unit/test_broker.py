"""What the sinks of brokers share: URLs with options, names made of fields, keys, messages."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.emit.row import Call, ordering_key
from relaybox.errors import ConfigError, UnknownSetting
from relaybox.sinks import broker
from relaybox.sinks.broker import Address, Messages, Template, explain, key_of, parse_address, tenant_of
from relaybox.sinks.kafka.sink import KafkaSettings
from relaybox.sinks.open import open_sink
from relaybox.testing.sink_contract import make_delivery

OPTIONS = {"stream": broker.text, "maxlen": broker.count, "tls": broker.flag}
OPTIONS["acks"] = broker.one_of("all", "1")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def parsed(sink: str, *, host_optional: bool = False, **options: Any) -> Address:
    return parse_address(Destination("shop", sink, **options), 9092, OPTIONS, host_optional=host_optional)


def delivery(**about: Any) -> Delivery:
    return msgspec.structs.replace(make_delivery(), **about)


@pytest.mark.parametrize(
    ("sink", "hosts"),
    [
        ("kafka://one", [("one", 9092)]),
        ("kafka://One:9093/", [("one", 9093)]),
        ("kafka://one:9093,two,three:1", [("one", 9093), ("two", 9092), ("three", 1)]),
        ("kafka://[::1]", [("::1", 9092)]),
        ("kafka://10.0.0.1,[::1]:9093,[fe80::1]", [("10.0.0.1", 9092), ("::1", 9093), ("fe80::1", 9092)]),
        ("kafka://user:pass@one:65535", [("one", 65535)]),
        ("kafka://one:", [("one", 9092)]),
    ],
)
def test_the_hosts_of_a_url(sink: str, hosts: list[tuple[str, int]]) -> None:
    assert list(parsed(sink).hosts) == hosts


@pytest.mark.parametrize(
    "sink",
    [
        *("kafka:", "kafka://", "kafka:///topic", "kafka://:9092", "kafka://one,", "kafka://,one"),
        *("kafka://one:0", "kafka://one:65536", "kafka://one:port", "kafka://one:-1", "kafka://one:1:2"),
        *("kafka://::1", "kafka://[::1", "kafka://[one]x", f"kafka://one:{'9' * 5000}", "kafka://one:٣"),
        *("kafka://user:geheim@", "kafka://user:geheim@one:port", "kafka://user:geheim@[::1", "kafka://a b"),
        *("kafka://user:geh/eim@one", "kafka://user:geh?eim@one"),
    ],
)
def test_a_url_without_a_host_is_an_error_that_shows_no_password(sink: str) -> None:
    with pytest.raises(ConfigError, match=r"destination 'shop': sink = .*write host:port") as raised:
        parsed(sink)
    assert "eim" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_where_a_host_may_be_left_out_it_may_be_left_out_whole() -> None:
    assert parsed("sqs:///orders", host_optional=True).hosts == ()
    assert parsed("sqs://user:pass@/orders", host_optional=True).password == "pass"
    assert parsed("sqs://one/orders", host_optional=True).hosts == (("one", 9092),)
    with pytest.raises(ConfigError, match="write host:port"):
        parsed("sqs://one,/orders", host_optional=True)


@pytest.mark.parametrize(
    ("sink", "login"),
    [
        ("kafka://one", (None, None)),
        ("kafka://user@one", ("user", None)),
        ("kafka://user:@one", ("user", "")),
        ("kafka://:pass@one", (None, "pass")),
        ("kafka://us%3Aer:p%40ss%2F%3F%23%25@one", ("us:er", "p@ss/?#%")),
        ("kafka://user:a:b@c@one", ("user", "a:b@c")),
        ("kafka://user:%C3%BC@one", ("user", "ü")),
    ],
)
def test_user_and_password_are_decoded(sink: str, login: tuple[str | None, str | None]) -> None:
    address = parsed(sink)
    assert (address.user, address.password) == login


def test_the_password_may_be_in_auth_and_only_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "geheim")
    (tmp_path / "password").write_text("aus der Datei\n")
    assert parsed("kafka://user@one", auth="geheim").password == "geheim"
    assert parsed("kafka://user@one", auth="env:KAFKA_PASSWORD").password == "geheim"
    assert parsed("kafka://user@one", auth=f"file:{tmp_path / 'password'}").password == "aus der Datei"
    with pytest.raises(ConfigError, match="holds a password, and auth is set too") as raised:
        parsed("kafka://user:geheim@one", auth="geheim")
    assert "geheim" not in str(raised.value)
    monkeypatch.delenv("KAFKA_PASSWORD")
    with pytest.raises(ConfigError, match=r"destination 'shop': auth: .*set the variable KAFKA_PASSWORD"):
        parsed("kafka://user@one", auth="env:KAFKA_PASSWORD")


def test_a_scheme_alone_is_not_an_address() -> None:
    with pytest.raises(ConfigError, match=r"sink = 'kafka' has no address; write it as kafka://…"):
        parsed("kafka")


def test_a_path_is_decoded_and_what_follows_a_number_sign_is_not_lost_in_silence() -> None:
    assert parsed("amqp://one").path == ""
    assert parsed("amqp://one/").path == ""
    assert parsed("amqp://one/a%2Fb/{tenant}").path == "a/b/{tenant}"
    assert parsed("kafka://one/{aggregate_type}-events").path == "{aggregate_type}-events"
    for sink in ("amqp://user:geheim@one/orders.#?key=geheim", "amqp://user:geh#eim@one"):
        with pytest.raises(ConfigError, match="write %23") as raised:
            parsed(sink)
        assert "geh" not in str(raised.value)


def test_options_stand_in_the_url_or_in_the_table() -> None:
    wanted = {"stream": "a b", "maxlen": 10, "tls": True, "acks": "all"}
    assert parsed("redis://one/?stream=a%20b&maxlen=10&tls=true&acks=all").options == wanted
    assert parsed("redis://one", options=wanted).options == wanted
    mixed = parsed("redis://one?maxlen=10&stream=a+b", options={"tls": True, "acks": "all"})
    assert mixed.options == wanted


@pytest.mark.parametrize(
    ("sink", "options", "reason"),
    [
        ("redis://one?maxlne=1", {}, "the redis sink has no setting 'maxlne'; did you mean 'maxlen'?"),
        ("redis://one", {"maxlne": 1}, "did you mean 'maxlen'?"),
        ("redis://one?zzz=geheim", {}, "known: acks, maxlen, stream, tls"),
        ("redis://one?maxlen=1&maxlen=2", {}, "says 'maxlen' twice"),
        ("redis://one?maxlen=1", {"maxlen": 1}, "sink and options both say 'maxlen'"),
        ("redis://one?maxlen=0", {}, "maxlen = 0: write a whole number"),
        (f"redis://one?maxlen={2**31}", {}, "no more than"),
        *((f"redis://one?maxlen={n}", {}, "write a whole number") for n in ("-1", "1.5", "٣", "9" * 5000)),
        *(("redis://one", {"maxlen": n}, "write a whole number") for n in (True, 1.0)),
        *((f"redis://one{n}", {}, "write true or false") for n in ("?tls=yes", "?tls")),
        *(("redis://one", {"tls": n}, "write true or false") for n in (1, [])),
        *(("redis://one?stream=", {}, "write a text"), ("redis://one", {"stream": 1}, "write a text")),
        ("redis://one?acks=0", {}, "choose 'all' or '1'"),
        *(("redis://one", {"acks": n}, "choose 'all' or '1'") for n in (1, {})),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(sink: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(sink, options=options)
    message = str(raised.value)
    assert message.startswith("destination 'shop': ")
    assert reason in message
    assert "geheim" not in message
    assert isinstance(raised.value, UnknownSetting) == ("did you mean" in reason or "known" in reason)


def test_nothing_that_is_shown_of_a_destination_holds_a_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    destination = Destination("shop", "kafka://user:geheim@one?stream=heimlich", options={"tls": "verborgen"})
    shown = f"{destination!r} {destination.options!r} {caplog.text}"
    assert not [word for word in ("geheim", "heimlich", "verborgen") if word in shown]


def test_an_error_of_a_client_is_one_line_without_the_password() -> None:
    parsed("kafka://user:ge%20heim@one")
    error = RuntimeError("cannot log in:\n\x1b[1m user / ge heim " + "x" * 1000)
    shown = explain(error)
    assert shown.startswith("RuntimeError: cannot log in: [1m user / *** xxx")
    assert shown.isprintable()
    assert len(shown) < 250
    assert explain(TimeoutError()) == "TimeoutError"


def template(written: str, **options: Any) -> Template:
    return Template(written, Destination("shop", "kafka://one"), "topic", **options)


def test_a_template_is_filled_with_the_fields_of_an_event() -> None:
    event = delivery(headers='{"tenant": "acme"}', aggregate_id="{7}")
    written = "{aggregate_type}/{aggregate_id}/{event_type}/{tenant}/{destination}"
    assert template(written)(event) == "Order/{7}/order.paid/acme/shop"
    assert template(written).fields == set(written.replace("{", "").replace("}", "").split("/"))
    assert template("{aggregate_type}-events", lower=True)(event) == "order-events"
    assert template("Orders")(event) == "Orders"
    assert template("a{{b}}c")(event) == "a{b}c"
    assert not template("a{{b}}c").fields


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{tenat}", "names 'tenat'; did you mean 'tenant'?"),
        ("{payload}", "known: aggregate_id, aggregate_type, destination, event_type, tenant"),
        *(("{}", "names ''"), ("{0}", "names '0'"), ("{tenant.upper}", "names 'tenant.upper'")),
        *(("{tenant[0]}", "names 'tenant[0]'"), ("{tenant!r}", "write the fields plainly")),
        ("{tenant:>10}", "write the fields plainly"),
        *(("{tenant:{event_type}}", "write the fields plainly"), ("{tenant", "expected '}'")),
        ("tenant}", "Single '}'"),
    ],
)
def test_a_template_that_is_wrong_is_an_error_at_once(written: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        template(written)
    assert str(raised.value).startswith(f"destination 'shop': topic = {written!r}")
    assert reason in str(raised.value)


@pytest.mark.parametrize("headers", ["{}", '{"tenant": null}', '{"tenant": 7}', "[]", "nonsense"])
def test_an_event_without_a_tenant_is_rejected_where_the_name_needs_one(headers: str) -> None:
    event = delivery(headers=headers)
    assert tenant_of(event) is None
    assert key_of(Destination("shop", "kafka://one", ordering="tenant"))(event) is None
    with pytest.raises(Reject, match="needs a tenant; emit with tenant="):
        template("{tenant}-events")(event)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("ordering", "key"),
    [("aggregate", "7"), ("tenant", "acme"), ("event_type", "order.paid"), ("none", None)],
)
def test_the_key_of_a_message_follows_the_strategy(ordering: Any, ordered: bool, key: str | None) -> None:
    destination = Destination("shop", "kafka://one", ordering=ordering, ordered=ordered)
    assert key_of(destination)(emitted(destination)) == key
    if ordered:
        assert key_of(destination)(emitted(destination, key="mine")) == "mine"


def test_the_key_of_a_function_is_known_where_it_is_ordered() -> None:
    def by_total(call: Call) -> str:
        return f"total-{call.payload['total']}"

    for ordered, key in ((True, "total-42"), (False, None)):
        destination = Destination("shop", "kafka://one", ordering=by_total, ordered=ordered)
        assert key_of(destination)(emitted(destination)) == key


def test_an_aggregate_whose_ordering_key_was_cut_has_its_id_as_the_key() -> None:
    destination = Destination("shop", "kafka://one", ordered=True)
    event = emitted(destination, aggregate_type="T" * 100, aggregate_id="x" * 255)
    assert event.ordering_key is not None
    assert len(event.ordering_key) == 255
    assert key_of(destination)(event) == "x" * 255


def emitted(
    destination: Destination, *, key: Any = ..., aggregate_type: str = "Order", aggregate_id: str = "7"
) -> Delivery:
    """Return what a relay claims of an event emitted to a destination."""
    call = Call(aggregate_type, aggregate_id, "order.paid", {"total": 42}, key=key, tenant="acme")
    return delivery(
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        headers='{"tenant": "acme"}',
        ordering_key=ordering_key(call, (aggregate_type, aggregate_id), destination),
    )


def headers_of(headers: Any, **options: Any) -> dict[str, str]:
    event = make_delivery(headers=headers if isinstance(headers, str) else json.dumps(headers))
    sent = Messages(Destination("shop", "kafka://one", **options))(event)
    assert sent.headers.pop("event-id") == str(event.event_id)
    own = {"event-type": "order.paid", "aggregate-type": "Order", "aggregate-id": "1"}
    assert {name: sent.headers.pop(name) for name in own} == own
    return sent.headers


def test_a_message_has_the_body_of_the_format() -> None:
    event = make_delivery()
    message = Messages(Destination("shop", "kafka://one", format="payload"))(event)
    assert (message.body, message.content_type) == (b'{"total": 42}', "application/json")
    binary = Messages(Destination("shop", "kafka://one", format="payload"))(make_delivery(data=b"\xff"))
    assert (binary.body, binary.content_type) == (b"\xff", "application/octet-stream")
    enveloped = Messages(Destination("shop", "kafka://one"))(event)
    assert json.loads(enveloped.body)["data"] == {"total": 42}


def test_the_emitters_headers_travel_and_values_that_are_not_text_travel_as_json() -> None:
    given = {"tenant": "acme", "n": 1, "on": True, "none": None, "list": [1, "ü"], "table": {"a": 1.5}}
    sent = {"tenant": "acme", "n": "1", "on": "true", "none": "null", "list": '[1,"ü"]', "table": '{"a":1.5}'}
    assert headers_of({**given, "e": ""}) == {**sent, "e": ""}


def test_a_trace_context_travels_if_it_is_well_formed_and_ours_are_those_that_we_know() -> None:
    assert headers_of({"traceparent": TRACEPARENT}) == {"traceparent": TRACEPARENT}
    assert headers_of({"traceparent": "00-nonsense", "a": "b"}) == {"a": "b"}
    assert headers_of({"traceparent": 7}) == {}
    assert headers_of({"relaybox-replay": "a\nb", "relaybox-secret": "x"}) == {"relaybox-replay": "a?b"}
    assert headers_of({"event-id": "x", "event-type": "x", "aggregate-type": "x", "aggregate-id": "x"}) == {}


@pytest.mark.parametrize("headers", ["[]", "7", "nonsense", '"text"', "null"])
def test_headers_that_are_no_table_are_none(headers: str) -> None:
    assert headers_of(headers) == {}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://host?exchang=x", "no setting 'exchang'; did you mean 'exchange'"),
        ("amqp://host?exchange=", "write a text"),
        ("amqp://host?exchange=a%22b", "AMQP takes no such name"),
        ("amqp://host?routing_key={evnt_type}", "did you mean 'event_type'"),
        ("amqp://host?heartbeat=70000", "no more than 65534"),
        ("amqp://host?ca=/etc/ca.pem", "amqps://"),
        ("amqps://host?ca=/no/such/file", "/no/such/file"),
        ("amqp://u:hush-hush@host:port", "host:port"),
    ],
)
def test_a_wrong_setting_is_reported_when_the_sink_is_made(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as raised:
        open_sink(Destination("shop", url), {})
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("sink", "options", "message"),
    [
        ("kafka://h/x?comprssion=lz4", {}, "did you mean 'compression'"),
        ("kafka://h/x", {"options": {"lingr": "5ms"}}, "did you mean 'linger'"),
        ("kafka://h/x?compression=rar", {}, "choose 'none', 'gzip'"),
        ("kafka://h/x?linger=soon", {}, "linger = 'soon': write a duration"),
        ("kafka://h/x?linger=2h", {}, "no more than 60s"),
        ("kafka://h/x?max_message=10", {}, "from 1000 to"),
        ("kafka://h/x?max_message=many", {}, "write a size"),
        ("kafka://h/x?ca=/no/such/file", {}, "there is no such file"),
        ("kafka://h/x?security=sasl_ssl", {}, "needs a user and a password"),
        ("kafka://u:p@h/x?security=ssl", {}, "takes no user"),
        ("kafka://h/x?mechanism=PLAIN", {}, "there is no user"),
        (f"kafka://u:p@h/x?security=sasl_plaintext&ca={__file__}", {}, "uses no ca"),
        (f"kafka://h/x?certificate={__file__}", {}, "belong together"),
        ("kafka://h/a b", {}, "1 to 249 letters"),
        ("kafka://h/{tenant}/x", {}, "1 to 249 letters"),
        ("kafka://h/{agregate_type}", {}, "did you mean 'aggregate_type'"),
        ("kafka://", {}, "write host:port"),
        ("kafka://h/x?partitioner=random", {"ordered": True}, "would be in several partitions"),
        ("kafka://u:p@h/x", {"auth": "p"}, "keep one of them"),
    ],
)
def test_kafka_refuses_a_wrong_setting_at_once(sink: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sink(Destination("shop", sink, **options), {})


def test_credentials_go_over_tls_unless_it_says_otherwise() -> None:
    def protocol(sink: str) -> Any:
        configuration = KafkaSettings(Destination("shop", sink)).configuration
        return configuration["security.protocol"]

    assert protocol("kafka://h") == "PLAINTEXT"
    assert protocol("kafka://user:secret@h") == "SASL_SSL"
    assert protocol(f"kafka://h?ca={__file__}") == "SSL"
    assert protocol("kafka://user:secret@h?security=sasl_plaintext") == "SASL_PLAINTEXT"


def test_the_producer_gives_up_before_the_sink_does() -> None:
    for timeout in (0.001, 0.5, 3.0, 30.0, 86_400.0 * 60):
        destination = Destination("shop", "kafka://h?linger=0", timeout=timeout, lease=timeout + 1)
        configured = KafkaSettings(destination).configuration["message.timeout.ms"]
        assert 1 <= configured < max(timeout * 1000, 2)
