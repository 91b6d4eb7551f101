"""Settings: what is taken, what is refused, and that no secret is ever shown."""

from __future__ import annotations

import dataclasses
import math
import traceback
import warnings
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.core.schemes import SCHEMES
from relaybox.core.settings import (
    Backoff,
    ConfigWarning,
    Destination,
    Route,
    Secret,
    Settings,
    normalize_url,
)
from relaybox.core.values import (
    identifier,
    mask_url,
    parse_duration,
    parse_rate,
    parse_size,
    without_password,
)
from relaybox.database import dialects
from relaybox.database.connect import connected
from relaybox.database.schema import make_tables
from relaybox.errors import ConfigError, StoreError, UnknownSetting
from relaybox.sinks.open import open_sink
from relaybox.stores.open import open_postgresql as open_store

URL = "https://example.org/events"


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (parse_duration, {"50ms": 0.05, "2s": 2, "1.5s": 1.5, "5m": 300, "1h": 3600, "7d": 604_800}),
        (parse_duration, {" 2s ": 2, 0: 0, 3: 3, 0.25: 0.25, timedelta(minutes=2): 120}),
        (parse_rate, {"100/s": 100, "600/m": 10, "10/h": 10 / 3600, 5: 5, 0.5: 0.5}),
        (parse_size, {"1MiB": 1_048_576, "512KiB": 524_288, "9B": 9, 1000: 1000}),
    ],
)
def test_a_duration_is_seconds_a_rate_events_a_second_and_a_size_bytes(
    parse: Callable[[Any, str], float], values: dict[Any, float]
) -> None:
    assert {value: parse(value, "setting") for value in values} == pytest.approx(values)


@pytest.mark.parametrize(
    "value",
    [
        *("", "abc", "5", "5 weeks", "-5s", "1e3s", "٣s", "2S"),
        *(-1, math.nan, math.inf, 10**400, True, None, [], timedelta(seconds=-1)),
    ],
)
def test_an_invalid_duration_is_refused(value: Any) -> None:
    message = refusal(lambda: parse_duration(value, "timeout"))
    assert message.startswith(f"timeout = {repr(value)[:40]}")
    assert "write a duration such as '50ms'" in message


@pytest.mark.parametrize(
    "value", ["", "fast", "100", "0/s", "-1/s", "100/d", "/s", 0, -1, math.nan, math.inf, True, None]
)
def test_an_invalid_rate_is_refused(value: Any) -> None:
    message = refusal(lambda: parse_rate(value, "rate_limit"))
    assert message.startswith(f"rate_limit = {value!r}: write a rate above zero")


@pytest.mark.parametrize("value", ["", "1", "1MB", "-1KiB", "0B", 0, -1, 1.5, True, None])
def test_an_invalid_size_is_refused(value: Any) -> None:
    message = refusal(lambda: parse_size(value, "max_payload"))
    assert message.startswith("max_payload = ")
    assert "'1MiB'" in message


@pytest.mark.parametrize(
    "name", ['a"; drop table x;--', "", "2a", "a b", "a-b", "a.b", "é", "x" * 41, "a\n", None, 3]
)
def test_only_a_plain_name_may_stand_in_sql(name: Any) -> None:
    for plain in ("a", "_a", "Outbox_2", "x" * 40):
        assert identifier(plain, "schema") == plain
    message = refusal(lambda: identifier(name, "schema"))
    assert message.startswith("schema = ")
    assert "letters, digits and underscores" in message


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("postgresql://u:p@h/db", ["postgres://u:p@h/db"]),
        ("postgresql://h/db?sslmode=require", ["postgresql://h/db?sslmode=require"]),
        ("postgresql://h/db", ["postgresql+psycopg://h/db", "postgresql+asyncpg://h/db"]),
        ("postgresql://h/Db", ["POSTGRESQL://h/Db"]),
        (
            "mysql://h/db",
            ["mysql://h/db", "mysql+asyncmy://h/db", "mariadb://h/db", "mariadb+pymysql://h/db"],
        ),
        ("sqlite:///relaybox.db", ["sqlite:///relaybox.db"]),
        ("sqlite:////var/x.db", ["sqlite+aiosqlite:////var/x.db"]),
        ("sqlite://", ["sqlite://"]),
    ],
)
def test_a_database_url_loses_its_driver(given: list[str], expected: str) -> None:
    assert {normalize_url(one) for one in given} == {expected}


@pytest.mark.parametrize(
    "url",
    [
        *("oracle://u:hunter2@h/db", "oracle://u:hun/ter2@hunter2@h", "mssql://h/db?password=hunter2"),
        *("u:hunter2@h/db", "postgresql:u:hunter2@h", "hunter2", "", None, 3),
    ],
)
def test_any_other_database_url_is_refused_without_its_password(url: Any) -> None:
    message = refusal(lambda: normalize_url(url))
    assert message.startswith("database ")
    assert "postgresql://, postgres://, mysql://, mariadb://, sqlite://" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "sqlite://shop.db",
            "sqlite://shop.db': write sqlite:///shop.db (three slashes; four for an absolute path)",
        ),
        ("sqlite+aiosqlite://:memory:", "sqlite://:memory:': write sqlite:///:memory: (three"),
        ("sqlite://u:hunter2@h/x", "sqlite://***@h/x': write sqlite:///***@h/x (three slashes"),
        ("postgresql://u:hunter2@h:abc/x", "postgresql://***@h:abc/x': the port 'abc' is not a number"),
        ("postgres://u:hunter2@h:1,i:2x/x?y=z", "postgresql://***@h:1,i:2x/x?***': the port '2x'"),
        ("mysql://[::1]:a", "mysql://[::1]:a': the port 'a' is not a number"),
        ("mysql://u:hun/ter2@h:a", "mysql://***@h:a': the port 'a' is not a number"),
    ],
)
def test_a_database_url_that_leads_nowhere_is_refused_with_the_fix(url: str, message: str) -> None:
    said = refusal(lambda: normalize_url(url))
    assert said.startswith(f"database = '{message}")
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "url",
    [
        *(
            *("postgresql://h:1,i:2,j/db", "postgresql://u:p@[::1]:5432/db", "postgresql:///db"),
            "mysql://[::1]/x",
        ),
        *("postgresql://u:p?w@h:5432/db", "mysql://u:a:b@h:1/x", "postgresql://u@/db?host=/tmp:x"),
        *("postgresql://h:1/db?options=a@b:c", "sqlite:////home/me@work/x.db", "sqlite:///C:/x.db"),
        *("sqlite:///file:x?mode=ro&uri=true", "sqlite://?uri=true", "sqlite:///:memory:"),
    ],
)
def test_unusual_database_urls_are_left_to_the_driver(url: str) -> None:
    assert normalize_url(url) == url


def test_the_name_of_a_file_and_an_engine_are_answered_with_a_url() -> None:
    assert refusal(lambda: normalize_url("shop.db")).endswith("; for a file: sqlite:///shop.db")
    assert refusal(lambda: normalize_url("/var/shop.sqlite3")).endswith(": sqlite:////var/shop.sqlite3")
    assert "for a file" not in refusal(lambda: normalize_url("u:p@h/x.db"))
    engine: Any = object()
    message = "database is of type object; write a URL such as postgresql://user@host/db, env:NAME or file:"
    assert refusal(lambda: Settings.load(None, {}, engine)).startswith(message)
    message = refusal(lambda: Settings(engine))
    assert message.startswith("database is of type object: write one of postgresql://")


def test_a_masked_url_still_says_where_it_points() -> None:
    assert mask_url("amqp://u:p@ss@host/vhost?key=1") == "amqp://***@host/vhost?***"
    assert mask_url("https://example.org") == "https://example.org"
    assert mask_url("kafka://broker:9092/orders") == "kafka://broker:9092/orders"


def test_the_path_of_a_webhook_is_masked_because_it_may_be_its_secret() -> None:
    slack = "https://hooks.slack.com/services/T024BE7LD/B0123/x7Jd92kKqLwZ"
    assert mask_url(slack) == "https://hooks.slack.com/***"
    assert mask_url(f"{slack}?thread=x7Jd#x7Jd") == "https://hooks.slack.com/***?***"
    assert mask_url("HTTPS://hooks.slack.com#x7Jd") == "HTTPS://hooks.slack.com#***"
    assert "x7Jd" not in repr(Destination("slack", slack))


def test_a_sink_may_be_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = Destination("slack", "env:SLACK_URL")
    # A process that only emits, or shows the dashboard, need not have it.
    with pytest.raises(ConfigError, match="destination 'slack': sink: env:SLACK_URL is missing or empty"):
        destination.check_secrets()
    with pytest.raises(ConfigError, match="set the variable SLACK_URL"):
        open_sink(destination, {})
    monkeypatch.setenv("SLACK_URL", "https://hooks.slack.com/services/x7Jd")
    destination.check_secrets()
    assert (destination.scheme, destination.url) == ("https", "https://hooks.slack.com/services/x7Jd")
    assert type(open_sink(destination, {})).__name__ == "HttpSink"
    assert "x7Jd" not in repr(destination)
    (tmp_path / "url").write_text("memory:\n")
    assert Destination("slack", f"file:{tmp_path / 'url'}").scheme == "memory"


@pytest.mark.parametrize("ordered", [None, True])
@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("hooks.slack.com/x7Jd", "write a URL such as https://example.org/events there"),
        ("debezium:", "write debezium: here"),
        ("handler:x7Jd:y", "write handler: here"),
        ("meilisearch://x7Jd@host/index", "also write ordered = true or ordered = false"),
    ],
)
def test_a_sink_in_a_variable_decides_nothing_about_how_events_are_stored(
    url: str, fix: str, ordered: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINK", url)
    if ordered and url.startswith("meili"):
        assert Destination("d", "env:SINK", ordered=True).scheme == "meilisearch"
        return
    message = refusal(lambda: Destination("d", "env:SINK", ordered=ordered))
    assert message.startswith("destination 'd': sink = 'env:SINK'")
    assert fix in message
    assert "x7Jd" not in message


def test_a_secret_is_a_value_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_SECRET", "hunter2")
    file = tmp_path / "secret"
    file.write_text("hunter3\n")
    assert Secret("hunter1").reveal() == "hunter1"
    assert Secret("whsec_a:b").reveal() == "whsec_a:b"
    assert Secret("env:RUNNER_SECRET").reveal() == "hunter2"
    assert Secret("env:RUNNER_SECRET").reveal({"RUNNER_SECRET": "hunter4"}) == "hunter4"
    assert Secret(f"file:{file}").reveal() == "hunter3"
    later = Secret("env:LATER")
    monkeypatch.setenv("LATER", "hunter2")
    assert later.reveal() == "hunter2", "it is read only when it is used"


def test_a_missing_secret_is_refused_by_its_name(tmp_path: Path) -> None:
    assert "set the variable NOPE" in refusal(lambda: Secret("env:NOPE").reveal({}))
    assert "env:NOPE is missing or empty" in refusal(lambda: Secret("env:NOPE").reveal({"NOPE": ""}))
    missing = tmp_path / "missing"
    assert f"write the secret into {missing}" in refusal(lambda: Secret(f"file:{missing}").reveal())
    assert "cannot be read as text" in refusal(lambda: Secret(f"file:{tmp_path}").reveal())


def test_a_secret_never_shows_itself(tmp_path: Path) -> None:
    secret = Secret("hunter2")
    destination = Destination("runner", "amqp://u:hunter2@h?key=hunter2", secret="hunter2", auth=secret)
    settings = Settings("postgresql://u:hunter2@h/db", [destination])
    for value in (secret, destination, settings, [secret], dataclasses.asdict(destination)["secret"]):
        assert "hunter2" not in f"{value} {value!r} {value!s:>5}"
    assert repr(secret) == "Secret(…)"
    assert str(Secret("env:NAME")) == "Secret(env:NAME)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Destination("a", URL, secret=["hunter2"]),  # type: ignore[arg-type]
        lambda: Destination("a", URL, auth=b"hunter2"),  # type: ignore[arg-type]
        lambda: Destination("a", "htp://u:hunter2@h"),
        lambda: Destination("a", "http://?token=hunter2"),
        lambda: Settings("oracle://u:hunter2@h"),
        lambda: Settings.load(None, {"RELAYBOX_DATABASE": "u:hunter2@h"}),
        lambda: Destination.from_mapping("a", {"sink": URL, "secret": "hunter2", "secrt": "hunter2"}),
    ],
)
def test_no_error_shows_a_secret(
    make: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hunter2" not in refusal(make)


def test_a_secret_file_that_is_not_text_does_not_leak_into_the_traceback(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"hunter2\xff")
    with pytest.raises(ConfigError) as caught:
        Secret(f"file:{file}").reveal()
    assert caught.value.__suppress_context__
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_backoff_takes_durations_and_a_route_one_name_or_several() -> None:
    assert Backoff() == Backoff(1.0, 3600.0, 2.0, 0.1)
    backoff = Backoff.from_mapping({"base": "60s", "cap": "1h", "factor": 3, "jitter": "full"})
    assert (backoff.base, backoff.cap, backoff.factor, backoff.jitter) == (60.0, 3600.0, 3.0, "full")
    assert Backoff(jitter=0).jitter == 0
    assert Route("file.*", to="runner") == Route(["file.*"], ["runner"])
    assert Route(["a", "b"], to=("x", "y")).events == ("a", "b")
    assert Route.from_mapping({"events": "a", "to": ["x", "y"]}).to == ("x", "y")


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"base": "soon"}, "backoff: base = 'soon': write a duration"),
        ({"base": "2h"}, "backoff: cap = 3600s is below base = 7200s; raise the cap"),
        ({"factor": 0.5}, "backoff: factor = 0.5: write a number, 1 or more"),
        ({"factor": math.inf}, "backoff: factor = inf"),
        ({"factor": True}, "backoff: factor = True"),
        ({"jitter": 2}, "backoff: jitter = 2: write a number, 0 to 1, or 'full'"),
        ({"jitter": "half"}, "backoff: jitter = 'half'"),
        ({"bse": 1}, "backoff has no setting 'bse'; did you mean 'base'?"),
    ],
)
def test_a_wrong_backoff_is_refused_and_says_whose_it_is(settings: dict[str, Any], seen: str) -> None:
    assert refusal(lambda: Backoff.from_mapping(settings)).startswith(seen)
    assert refusal(lambda: Destination("a", URL, backoff=settings)).startswith(f"destination 'a': {seen}")


def test_a_destination_has_the_documented_defaults() -> None:
    destination = Destination("runner", URL)
    expected: dict[str, Any] = {"name": "runner", "sink": URL, "format": "json", "allow": (), "options": {}}
    expected |= {"once": False, "ordered": False, "ordering": "aggregate", "on_failed": "skip"}
    expected |= {"max_attempts": 5, "timeout": 30.0, "concurrency": 50, "batch_size": 100, "lease": 60.0}
    expected |= {"poll_interval": 1.0, "retention": 604_800.0}
    expected |= dict.fromkeys(("rate_limit", "dead_letter", "secret", "auth"))
    expected["backoff"] = {"base": 1.0, "cap": 3600.0, "factor": 2.0, "jitter": 0.1}
    assert dataclasses.asdict(destination) == expected


def test_a_destination_normalises_what_it_is_given() -> None:
    times: dict[str, Any] = {"timeout": timedelta(seconds=5), "lease": "2m", "poll_interval": 0.5}
    times |= {"retention": 0, "rate_limit": "600/m", "backoff": {"base": "60s"}}
    networks = ["10.0.0.0/8", "::1/128", "127.0.0.1"]
    destination = Destination("runner", URL, secret="env:RUNNER_SECRET", allow=networks, **times)
    assert (destination.timeout, destination.lease, destination.poll_interval) == (5.0, 120.0, 0.5)
    assert (destination.retention, destination.rate_limit) == (0.0, 10.0)
    assert destination.secret == Secret("env:RUNNER_SECRET")
    assert destination.allow == tuple(networks)
    assert destination.backoff == Backoff(base=60)


def test_a_destination_is_frozen_hashable_and_can_be_changed_by_copy() -> None:
    destination = Destination("runner", URL, timeout="5s", secret="hunter2")
    assert dataclasses.replace(destination) == destination
    assert hash(dataclasses.replace(destination)) == hash(destination)
    assert dataclasses.replace(destination, timeout="6s").timeout == 6.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        destination.timeout = 1.0  # type: ignore[misc]


def test_an_ordered_destination_blocks_where_nothing_else_is_said() -> None:
    table = {"sink": URL, "ordered": True, "timeout": "5s"}
    assert Destination.from_mapping("runner", table) == Destination("runner", URL, ordered=True, timeout=5)
    assert Destination("a", URL, ordered=True).on_failed == "block"
    assert Destination("a", URL, ordered=True, on_failed="skip").on_failed == "skip"
    destination = Destination("a", URL, ordering=str, format=repr)
    assert (destination.ordering, destination.format) == (str, repr), "both may be functions"


@pytest.mark.parametrize("scheme", ["meilisearch", "meilisearchs", "Algolia", "opensearch"])
def test_a_search_index_is_ordered_unless_it_says_otherwise(scheme: str) -> None:
    url = f"{scheme}://host/documents"
    destination = Destination("a", url)
    assert (destination.ordered, destination.on_failed) == (True, "block")
    destination = Destination.from_mapping("a", {"sink": url, "ordered": False})
    assert (destination.ordered, destination.on_failed) == (False, "skip")
    assert Destination("a", URL).on_failed == "skip"


@pytest.mark.parametrize("scheme", sorted(SCHEMES - {"http", "https", "debezium"}))
def test_every_sink_of_the_list_is_taken_with_or_without_a_host(scheme: str) -> None:
    for sink in (f"{scheme}://host/path", f"{scheme}:", scheme, scheme.upper()):
        assert Destination("a", sink).sink == sink


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sink": "htps://h"}, "sink: 'htps' is not a known scheme; did you mean 'https'?"),
        ({"sink": "hooks.example/a-secret"}, "sink has no known scheme; write a URL such as https://"),
        ({"sink": "zzz://h"}, "sink: 'zzz' is not a known scheme; known: algolia, amqp"),
        ({"sink": ""}, "sink = '': write a URL"),
        ({"sink": None}, "sink = None: write a URL"),
        ({"sink": "http:///path"}, "sink = 'http:///path': name a host"),
        ({"sink": "https:"}, "sink = 'https:': name a host"),
        ({"ordered": "yes"}, "ordered = 'yes': write true or false"),
        (
            {"ordering": "agregate"},
            "ordering = 'agregate': choose 'aggregate', 'tenant', 'event_type', 'none' or a fun",
        ),
        ({"on_failed": "stop"}, "on_failed = 'stop': choose 'block' or 'skip'"),
        ({"max_attempts": 0}, "max_attempts = 0: write a whole number, 1 or more"),
        ({"max_attempts": True}, "max_attempts = True: write a whole number"),
        ({"max_attempts": "5"}, "max_attempts = '5': write a whole number"),
        ({"concurrency": 0}, "concurrency = 0: write a whole number"),
        ({"batch_size": 1.5}, "batch_size = 1.5: write a whole number"),
        ({"timeout": 0}, "timeout = 0: it must be 0.001s or longer"),
        ({"timeout": "soon"}, "timeout = 'soon': write a duration"),
        ({"lease": "500ms"}, "lease = '500ms': it must be 1s or longer"),
        ({"poll_interval": 0}, "poll_interval = 0: it must be 0.001s or longer"),
        ({"retention": "-1d"}, "retention = '-1d': write a duration"),
        ({"rate_limit": "fast"}, "rate_limit = 'fast': write a rate"),
        ({"dead_letter": ""}, "dead_letter = '': write a name"),
        ({"format": "xml"}, "format = 'xml': choose 'json', 'flat', 'cloudevents', 'payload' or a function"),
        ({"secret": ""}, "secret is empty; write a value, env:NAME or file:PATH"),
        ({"secret": "env:"}, "secret is empty"),
        ({"auth": 5}, "auth is of type int; write a value, env:NAME or file:PATH"),
        ({"allow": ["10.0.0.1/8"]}, "allow = '10.0.0.1/8': write a network such as '10.0.0.0/8'"),
        ({"allow": "everything"}, "allow = 'everything': write a network"),
        ({"backoff": 5}, "backoff is a int; write a table of settings"),
    ],
)
def test_a_wrong_setting_is_refused_with_value_and_fix(settings: dict[str, Any], message: str) -> None:
    said = refusal(lambda: Destination(**{"name": "runner", "sink": URL} | settings))
    assert said.startswith(f"destination 'runner': {message}")


@pytest.mark.parametrize("name", ["", "x" * 101, "a\0b", "a\nb", "a\x1b[0m", "\ud800", None, 7])
def test_a_wrong_name_is_refused(name: Any) -> None:
    assert ": name = " in refusal(lambda: Destination(name, URL))


def test_a_name_may_be_any_printable_text() -> None:
    for name in ("a", "x" * 100, "orders → search", "a.b/c"):
        assert Destination(name, URL).name == name


def test_a_lease_shorter_than_the_timeout_is_argued_with() -> None:
    with pytest.warns(ConfigWarning, match="lease 10s is shorter than timeout 30s") as caught:
        Destination("a", URL, lease="10s")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Destination("a", URL, lease="30s")


LONG = "x" * 24


@pytest.mark.parametrize(
    ("secret", "bytes_"), [("hush", 4), (f"{LONG} hush until:2099-12-31", 4), ("whsec_c2VjcmV0IGtleQ==", 10)]
)
def test_a_secret_that_might_be_guessed_is_argued_with(secret: str, bytes_: int) -> None:
    with pytest.warns(ConfigWarning, match=f"destination 'a': secret has a key of {bytes_} bytes") as caught:
        Destination("a", "https://example.org/", secret=secret)
    assert caught[0].filename == __file__
    assert "use 24 or more; `relaybox secret new` prints one" in str(caught[0].message)
    assert "hush" not in str(caught[0].message)


@pytest.mark.parametrize(
    "secret", [LONG, f"whsec_{b64encode(bytes(24)).decode()}", f"whsk_{'A' * 43}", "env:NOT_IN_THIS_PROCESS"]
)
def test_a_secret_that_is_long_enough_or_missing_here_is_taken_as_it_is(secret: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Destination("a", "https://example.org/", secret=secret)


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    nearest = "destination 'a' has no setting 'timout'; did you mean 'timeout'"
    with pytest.raises(UnknownSetting, match=nearest):
        Destination.from_mapping("a", {"sink": URL, "timout": 1})
    with pytest.raises(UnknownSetting):
        Destination.from_mapping("a", {"sink": URL, "name": "b"})
    for name in ("url", "endpoint"):
        with pytest.raises(UnknownSetting, match=f"has no setting '{name}'; did you mean 'sink'?"):
            Destination.from_mapping("a", {name: URL})
    assert "destination 'a' has no sink; write one" in refusal(lambda: Destination.from_mapping("a", {}))
    assert "destination 'a' is a str; write a table" in refusal(
        lambda: Destination.from_mapping("a", URL)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"events": "order.*"}, "route 'order.*': to is missing; write a name"),
        ({"events": ["a", "b.*"], "to": []}, "route 'a', 'b.*': to = []: write a name"),
        ({"to": "a"}, "route: events is missing; write a name"),
        ({"events": "", "to": "a"}, "route: events = ''"),
        ({"events": ["a", " "], "to": "a"}, "route: events = ['a', ' ']"),
        ({"events": [1], "to": "a"}, "route: events = [1]"),
        ({"events": 5, "to": "a"}, "route: events = 5"),
        ({"event": "a", "to": "a"}, "a route has no setting 'event'; did you mean 'events'?"),
        ({"match": "a", "to": "a"}, "a route has no setting 'match'; did you mean 'events'?"),
        ({"pattern": "a", "to": "a"}, "a route has no setting 'pattern'; did you mean 'events'?"),
    ],
)
def test_a_wrong_route_is_refused(mapping: dict[str, Any], message: str) -> None:
    assert refusal(lambda: Route.from_mapping(mapping)).startswith(message)


def test_settings_have_the_documented_defaults() -> None:
    settings = Settings()
    assert settings.database == "sqlite:///relaybox.db"
    assert (settings.destinations, settings.routes) == ((), ())
    assert (settings.schema, settings.prefix, settings.app) == (None, "", None)
    assert (settings.unrouted, settings.max_payload) == ("raise", 1_048_576)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"destinations": [Destination("a", URL)] * 2}, "destinations: two are called 'a'; rename one"),
        ({"destinations": ["a"]}, "destinations = 'a': give Destination objects"),
        ({"routes": ["a"]}, "routes = 'a': give Route objects"),
        ({"destinations": Destination("a", URL)}, "destinations: give a list of Destination objects"),
        ({"routes": Route("a", to="a")}, "routes: give a list of Route objects"),
        (
            {"destinations": [Destination("runner", URL)], "routes": [Route("a", to="runer")]},
            "route 'a': to = 'runer': no destination has this name; did you mean 'runner'?",
        ),
        (
            {"routes": [Route("a", to="x")]},
            "route 'a': to = 'x': no destination has this name; none is configured",
        ),
        (
            {"destinations": [Destination("a", URL, dead_letter="graveyrd"), Destination("graveyard", URL)]},
            "destination 'a': dead_letter = 'graveyrd': no destination has this name; did you mean 'gr",
        ),
        (
            {"destinations": [Destination("a", URL, dead_letter="a")]},
            "destination 'a': dead_letter = 'a': name another destination, not itself",
        ),
        ({"schema": "a b"}, "schema = 'a b': use up to 40"),
        ({"schema": ""}, "schema = '': use up to 40"),
        ({"prefix": 'a"; drop table x;--'}, "prefix = 'a\"; drop table x;--': use up to 40"),
        ({"unrouted": "drop"}, "unrouted = 'drop': choose 'raise' or 'store'"),
        ({"max_payload": "big"}, "max_payload = 'big': write a size"),
        ({"database": "oracle://h"}, "database = 'oracle://h': write one of"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    assert refusal(lambda: Settings(**settings)).startswith(message)


FILE = """
[relaybox]
database = "env:DB"
app = "myapp.outbox:outbox"
unrouted = "store"
max_payload = "512KiB"

[destinations.runner]
sink = "https://runner.example/events"
secret = "env:RUNNER_SECRET"
allow = ["10.0.0.0/8"]
ordered = true
timeout = "30s"
backoff = { base = "60s", cap = "1h", factor = 2, jitter = 0.1 }
rate_limit = "100/s"

[[routes]]
events = ["file.*", "document.*"]
to = ["runner"]
"""
ENV = {"DB": "postgres://u:hunter2@h/db"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_settings_are_read_from_the_file(here: Path) -> None:
    (here / "other.toml").write_text(FILE)
    settings = Settings.load(here / "other.toml", ENV)
    runner = Destination(
        "runner",
        "https://runner.example/events",
        secret="env:RUNNER_SECRET",
        allow=["10.0.0.0/8"],
        ordered=True,
        rate_limit=100,
        backoff=Backoff(base=60),
    )
    route = Route(["file.*", "document.*"], to="runner")
    general: dict[str, Any] = {"app": "myapp.outbox:outbox", "unrouted": "store", "max_payload": 524_288}
    assert settings == Settings("postgresql://u:hunter2@h/db", [runner], [route], **general)


def test_the_file_is_found_where_the_program_runs(here: Path) -> None:
    assert Settings.load(None, {}) == Settings()
    (here / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert Settings.load(None, {}) == Settings()
    text = FILE.replace("[relaybox]", "[tool.relaybox]").replace("[[routes", "[[tool.relaybox.routes")
    text = text.replace("[destinations.", "[tool.relaybox.destinations.")
    (here / "pyproject.toml").write_text(text)
    from_pyproject = Settings.load(None, ENV)
    assert from_pyproject.destinations[0].name == "runner"
    (here / "relaybox.toml").write_text(FILE)
    assert Settings.load(None, ENV) == from_pyproject
    (here / "relaybox.toml").write_text('[relaybox]\nprefix = "x_"\n')
    assert Settings.load(None, ENV).prefix == "x_"


def test_the_database_is_the_one_given_then_the_environment_s_then_the_file_s(here: Path) -> None:
    (here / "relaybox.toml").write_text('[relaybox]\ndatabase = "sqlite:///file.db"\n')
    env = {"RELAYBOX_DATABASE": "sqlite:///env.db", "DATABASE_URL": "sqlite:///url.db"}
    assert Settings.load(None, env, "sqlite:///given.db").database == "sqlite:///given.db"
    assert Settings.load(None, env).database == "sqlite:///env.db"
    assert Settings.load(None, env | {"RELAYBOX_DATABASE": ""}).database == "sqlite:///file.db"
    (here / "relaybox.toml").unlink()
    assert Settings.load(None, {"DATABASE_URL": "sqlite:///url.db"}).database == "sqlite:///url.db"
    assert Settings.load(None, {}).database == "sqlite:///relaybox.db"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("database = 'x'", "relaybox.toml has no setting 'database'; write it under [relaybox]"),
        ("max_payload = 5", "relaybox.toml has no setting 'max_payload'; write it under [relaybox]"),
        ("[route]", "relaybox.toml has no setting 'route'; did you mean 'routes'?"),
        ("[relaybox]\ndatbase = 'x'", "[relaybox] has no setting 'datbase'; did you mean 'database'?"),
        ("[relaybox]\ndatabase = 5", "database in the file is of type int"),
        (
            "[relaybox]\ndatabase = 'env:NOPE'",
            "database in the file: env:NOPE is missing or empty; set the variable NOPE",
        ),
        ("[relaybox", "relaybox.toml cannot be read as TOML"),
        ("relaybox = 5", "[relaybox] is a int; write a table"),
        ("destinations = 5", "destinations = 5: write each as a [destinations.NAME] table"),
        ("[destinations]\nrunner = 5", "destination 'runner' is a int; write a table"),
        ("[routes]\nevents = 'a'", "routes = {'events': 'a'}: write each route as a [[routes]] table"),
        ("routes = [5]", "a route is a int; write a table"),
        ("[[routes]]\nevents = 'a'\nto = 'x'", "route 'a': to = 'x': no destination"),
    ],
)
def test_a_wrong_file_is_refused(here: Path, text: str, message: str) -> None:
    (here / "relaybox.toml").write_text(text)
    assert refusal(lambda: Settings.load(None, {})).startswith(message)


def test_a_file_that_is_named_must_be_there(here: Path) -> None:
    assert "gone.toml does not exist" in refusal(lambda: Settings.load(here / "gone.toml", {}))
    (here / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "has no [tool.relaybox] table" in refusal(lambda: Settings.load(here / "pyproject.toml", {}))


@pytest.mark.parametrize("secret", ["pass word", "hu%sh", "hush%", "hush%2", "hush%zz", "hu\tsh", "hu\nsh"])
@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "postgres+psycopg"])
def test_what_drivers_cannot_read_is_refused_at_once_and_not_shown(scheme: str, secret: str) -> None:
    with pytest.raises(ConfigError, match="write %20 for a space and %25 for a %") as raised:
        normalize_url(f"{scheme}://me:{secret}@db/shop")
    assert secret not in str(raised.value)
    with pytest.raises(ConfigError):
        normalize_url(f"{scheme}://{secret}@db/shop")


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://me:hu%20sh%25@db/shop", "postgresql://me:hush@db/shop?options=-c%20x%3D1"),
        *("postgresql://db/shop", "mysql://me:100%25@db/shop"),
    ],
)
def test_what_they_can_read_is_taken(url: str) -> None:
    assert normalize_url(url) == url


URLS = [
    *("postgresql://me:hush-hush%zz@db/shop", "postgresql://me:hush hush@db/shop"),
    *("postgresql://me:hush-hush/x@db/shop", "postgresql://me:hush-hush?x@db/shop"),
    "postgresql://me@db/shop?password=hush-hush%zz",
    "postgresql://me@db/shop?sslpassword=hush%20hush&nothing=5",
]


@pytest.mark.parametrize("url", URLS)
async def test_a_password_that_libpq_stumbles_over_is_in_no_message(url: str) -> None:
    with pytest.raises((StoreError, ConfigError)) as raised, connected(url) as execute:
        execute("SELECT 1")
    assert "hush" not in str(raised.value)
    store = open_store(url, make_tables(sa.MetaData()))
    with pytest.raises(StoreError) as refused:
        await store.now()
    assert "hush" not in str(refused.value)
    await store.close()


def test_raw_and_decoded_both_are_hidden() -> None:
    url = "postgresql://me:hu%2Fsh%40@db/shop?password=se%20cret&sslmode=require"
    said = f"of {url}: hu%2Fsh%40, hu/sh@, se%20cret, se cret; db refuses me"
    shown = "of postgresql://***@db/shop?***: ***, ***, ***, ***; db refuses me"
    assert without_password(said, url) == shown
    assert str(dialects.refusal(psycopg.OperationalError(said), url)) == shown
    assert without_password("no more room", "postgresql://me:no@db/shop") == "no more room"
