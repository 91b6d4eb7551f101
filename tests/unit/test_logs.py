"""What a person on call reads of a relay, and how a log is written."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.cli.logs import JsonFormatter, LogFormat, LogLevel, TextFormatter, colours, configure
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.core.text import span
from relaybox.errors import StoreError
from relaybox.operate.observers.count import Count, Counter
from relaybox.operate.observers.log import FAILURES, TEXTS, LogObserver, one_line
from relaybox.stores.store import Claim, Held, Settlement
from tests.unit.deliveries import make

NOBODY: frozenset[UUID] = frozenset()
RETRIED = Retried(2.0, "503 Service Unavailable")


class Relay:
    """An observer, its clock and what it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "relaybox.relay")
        self._caplog = caplog
        self.now = 1000.0
        self.observer = LogObserver(lambda: self.now)

    def settle(self, *outcomes: Outcome, destination: str = "runner", **fields: Any) -> None:
        settlements = [Settlement(make(**fields), outcome) for outcome in outcomes]
        self.observer.settled(destination, settlements, NOBODY)

    def poll(self, seconds: float, held: Held | None = None) -> list[str]:
        """Return what is written if there are only empty claims for so many seconds."""
        self.now += seconds
        self.observer.claimed("runner", Claim(held=held))
        return self.said()

    def said(self, least: int = logging.INFO) -> list[str]:
        records = self._caplog.records[:]
        self._caplog.clear()
        return [record.getMessage() for record in records if record.levelno >= least]

    def logged(self) -> list[dict[str, Any]]:
        """Return the values of the records."""
        return [record.relay for record in self._caplog.records]  # type: ignore[attr-defined]


@pytest.fixture
def relay(caplog: pytest.LogCaptureFixture) -> Relay:
    return Relay(caplog)


def test_work_is_logged_soon_after_quiet_and_then_every_ten_seconds(relay: Relay) -> None:
    relay.settle(*[Delivered()] * 1240, age=89.6)
    assert relay.poll(0.5) == []
    assert relay.poll(0.5) == [
        "runner  delivered 1,240  retried 0  failed 0  lag p50 1 min 30 s  p99 1 min 30 s"
    ]
    relay.settle(Delivered(), Released())
    assert relay.poll(9.5) == []
    assert relay.poll(0.5)[0].startswith("runner  delivered 1  retried 0  failed 0  lag p50 ")
    assert [relay.poll(1.0) for _ in range(60)] == [[]] * 60, "it does nothing"


def test_each_failure_is_a_line_with_its_reason_and_what_to_ask(relay: Relay) -> None:
    event_id = uuid4()
    relay.settle(Failed("no such\ncustomer\x1b[31m"), attempts=5, event_id=event_id)
    assert relay.said(logging.ERROR) == [
        "runner  failed order.paid of Order 7 (attempt 5 of 5): no such customer [31m; "
        f"see `relaybox why {event_id}`"
    ]


def test_a_flood_of_failures_is_cut_and_counted(relay: Relay) -> None:
    relay.settle(*[Failed("no")] * (FAILURES + 20))
    assert len(relay.said(logging.ERROR)) == FAILURES
    more, summary = relay.poll(1)
    assert more == "runner  and 20 more failures"
    assert "failed 120" in summary


def test_retries_are_logged_up_to_five_and_then_counted(relay: Relay) -> None:
    relay.settle(*[RETRIED] * 125)
    said = relay.said()
    again = "runner  again in 2.0 s: order.paid of Order 7 (attempt 1 of 5): 503 Service Unavailable"
    assert said == [again] * 5
    assert relay.poll(1) == ["runner  and 120 more retries", "runner  delivered 0  retried 125  failed 0"]
    relay.settle(Retried(0.25, "refused", counts=False))
    assert relay.said() == ["runner  again in 250 ms: order.paid of Order 7 (not counted): refused"]


def test_what_was_lost_is_not_counted_as_ours(relay: Relay) -> None:
    mine, lost = make(), make()
    settlements = [Settlement(mine, Delivered()), Settlement(lost, Failed("x"))]
    relay.observer.settled("runner", settlements, frozenset([lost.id]))
    assert relay.said(logging.WARNING) == [
        "runner  lost a lease: another relay took over, and may deliver once more"
    ]
    assert "delivered 1  retried 0  failed 0" in relay.poll(1)[0]


def test_events_that_failed_because_relays_died_are_logged(relay: Relay) -> None:
    relay.observer.claimed("runner", Claim(failed=(make(attempts=6, max_attempts=5),)))
    assert "(attempt 5 of 5): the relay died each time it held this event" in relay.said(logging.ERROR)[0]
    assert "failed 1" in relay.poll(1)[0]


def test_a_circuit_is_logged_when_it_opens_and_closes_but_not_its_probes(relay: Relay) -> None:
    relay.observer.circuit("runner", "open", "cannot connect")
    assert relay.said() == ["runner  circuit open: cannot connect; deliveries wait"]
    for _ in range(3):
        assert relay.poll(10, Held("open", 5.0, "cannot connect")) == []
        # The claim of a probe gets through.
        assert relay.poll(0) == []
        relay.observer.circuit("runner", "half_open", "")
        relay.observer.circuit("runner", "open", "cannot connect")
        assert relay.said() == []
    relay.observer.circuit("runner", "open", "503")
    assert relay.said() == ["runner  circuit open: 503; deliveries wait"]
    relay.observer.circuit("runner", "half_open", "")
    relay.observer.circuit("runner", "closed", "")
    assert relay.said() == ["runner  circuit closed after 30 s"]
    assert relay.poll(1) + relay.poll(1) == []


def test_functions_over_their_time_are_logged_when_there_are_more_and_when_there_are_none(
    relay: Relay,
) -> None:
    for count in (0, 1, 1, 3, 2, 3, 0, 0):
        relay.observer.overdue("runner", count)
    assert relay.said() == [
        "runner  a function is over the timeout and still running; threads cannot be stopped",
        "runner  3 functions are over the timeout and still running; threads cannot be stopped",
        "runner  no function is over the timeout any more",
    ]


def test_changes_by_others_are_logged_too(relay: Relay) -> None:
    paused = Held("paused", None, "maintenance")
    said = ["runner  paused: maintenance; go on with `relaybox resume runner`"]
    assert relay.poll(1, paused) == said
    assert relay.poll(1, paused) == []
    assert relay.poll(60) == ["runner  resumed after 1 min 1 s"]
    assert relay.poll(1, Held("open", 5.0, "refused")) == ["runner  circuit open: refused; deliveries wait"]
    assert relay.poll(1) == []
    assert relay.poll(1) == ["runner  circuit closed after 2.0 s"]


def test_trouble_with_the_database_is_logged_once_for_all_destinations(relay: Relay) -> None:
    for _ in range(300):
        for destination in ("runner", "audit"):
            relay.observer.trouble(destination, "claim", StoreError("connection refused"))
        relay.now += 1
    relay.observer.trouble("runner", "settle", StoreError("the server is starting up"))
    assert relay.said() == [
        "database  cannot claim, trying again: connection refused",
        "database  cannot settle, trying again: the server is starting up",
    ]
    # One success among failures is not the end of it.
    assert relay.poll(1) == []
    assert relay.poll(2) == ["database  answers again, after 5 min"]
    assert relay.poll(1) == []


def test_trouble_that_is_never_the_same_does_not_flood_the_log(relay: Relay) -> None:
    for number in range(1000):
        relay.observer.trouble("runner", "claim", StoreError(f"connection {number} refused"))
    assert len(relay.said()) == TEXTS
    relay.settle(RETRIED, destination="a long name")
    relay.settle(RETRIED, destination="short")
    assert relay.said()[1].startswith("short        again in"), "names are aligned"


def test_a_defect_is_logged_with_its_traceback_once_a_minute(relay: Relay) -> None:
    for _ in range(2):
        for _ in range(50):
            relay.observer.trouble("runner", "run", ZeroDivisionError("division by zero"))
        relay.now += 61
    assert relay.said() == ["runner  cannot run, trying again: ZeroDivisionError: division by zero"] * 2


def test_the_end_logs_what_was_not_logged_yet_and_the_sum(relay: Relay) -> None:
    relay.settle(*[Delivered()] * 3)
    relay.poll(1)
    relay.settle(Delivered(), RETRIED)
    relay.said()
    relay.now += 3600
    relay.observer.stopped()
    last, end = relay.said()
    assert last.startswith("runner  delivered 1  retried 1  failed 0")
    assert end == "stopped after 1 h: delivered 4, retried 1, failed 0"


def test_records_carry_their_values(relay: Relay) -> None:
    event_id = uuid4()
    relay.settle(Failed("no"), Delivered(), event_id=event_id)
    relay.now += 1
    relay.observer.extended("runner", NOBODY)
    relay.observer.claimed("runner", Claim())
    failed, delivered, summary = relay.logged()
    of_both = {"destination": "runner", "event_id": str(event_id), "event_type": "order.paid"}
    of_both |= {"attempt": 1, "max_attempts": 5}
    assert failed == {**of_both, "event": "failed", "error": "no"}
    assert delivered == {**of_both, "event": "delivered"}
    assert summary.pop("lag_p50") == summary.pop("lag_p99") >= 0
    assert summary == {"destination": "runner", "event": "summary", "delivered": 1, "retried": 0, "failed": 1}


def test_spans_have_two_units_at_most_and_a_text_from_outside_stays_on_its_line() -> None:
    spans = {-1.0: "0 ms", 0.0124: "12 ms", 0.9996: "1.0 s", 1.25: "1.2 s", 30: "30 s", 59.7: "1 min"}
    spans |= {90: "1 min 30 s", 3600: "1 h", 3725: "1 h 2 min", 90_061: "1 d 1 h", 86_400 + 59: "1 d"}
    assert {seconds: span(seconds) for seconds in spans} == spans
    assert one_line(" a\r\nb\x1b]0;x\x07 ") == "a b ]0;x"
    assert len(one_line("x" * 100_000)) == 301


def test_a_counter_counts_by_destination_and_knows_what_is_held() -> None:
    counter = Counter()
    counter.settled("a", [Settlement(make(), Delivered()), Settlement(make(), RETRIED)], NOBODY)
    counter.settled("b", [Settlement(make(), Failed("x")), Settlement(make(), Released())], NOBODY)
    counter.claimed("b", Claim(failed=(make(),)))
    counter.claimed("a", Claim(held=Held("paused", None)))
    assert dict(counter.counts) == {"a": Count(1, 1, 0), "b": Count(0, 0, 2)}
    assert counter.total == Count(1, 1, 2)
    assert list(counter.held) == ["a"]
    counter.claimed("a", Claim((make(),)))
    assert not counter.held


def test_only_who_debugs_gets_every_outcome(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.settle(*[Failed("no")] * (FAILURES + 3), *[RETRIED] * 8, *[Delivered()] * 4)
    names = [one["event"] for one in relay.logged()]
    assert (names.count("failed"), names.count("retried"), names.count("delivered")) == (FAILURES + 3, 8, 4)
    caplog.clear()
    caplog.set_level(logging.INFO, "relaybox.relay")
    relay.settle(*[Delivered()] * 4)
    assert relay.logged() == []


def test_a_record_names_the_trace(relay: Relay) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = f'{{"traceparent": "00-{trace}-b7ad6b7169203331-01"}}'
    relay.observer.settled("runner", [Settlement(make(headers=headers), Failed("no"))], NOBODY)
    [logged] = relay.logged()
    assert logged["trace_id"] == trace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(level: int, message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("relaybox.relay", level, "x.py", 1, message, None, extra.pop("exc_info", None))  # type: ignore[arg-type]
    made.created = 1_763_190_000.25
    vars(made).update(extra)
    return made


def raised(text: str = "x") -> object:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_line_for_people_is_coloured_on_a_terminal_unless_NO_COLOR_says_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours(Terminal())
    assert not colours(io.StringIO())
    assert TextFormatter(colour=True).format(record(logging.ERROR, "x")).endswith("\x1b[31merror  \x1b[0m x")
    monkeypatch.setenv("TERM", "dumb")
    assert not colours(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours(Terminal())
    line = TextFormatter(colour=False).format(record(logging.WARNING, "runner  paused"))
    assert line[4] == line[7] == "-"
    assert line[19:] == ".250 warning runner  paused"
    assert TextFormatter(colour=False).format(record(logging.CRITICAL, "x")).endswith(" error   x")


def test_an_object_for_programs_has_the_values_of_the_record_and_its_traceback() -> None:
    made = record(logging.INFO, "runner  delivered 1", relay={"event": "summary", "delivered": 1})
    assert json.loads(JsonFormatter().format(made)) == {
        "time": "2025-11-15T07:00:00.250+00:00",
        "level": "info",
        "logger": "relaybox.relay",
        "message": "runner delivered 1",
        "event": "summary",
        "delivered": 1,
    }
    made = record(logging.WARNING, "x", exc_info=raised())
    assert TextFormatter(colour=False).format(made).endswith("\n  ValueError: x")
    text = JsonFormatter().format(made)
    assert "\n" not in text
    assert json.loads(text)["traceback"].endswith("ValueError: x")


@pytest.mark.parametrize(
    "forged", ["\n", "\r", "\x0b", "\x85", "\u2028", "\x1b[2J", "\x9b2J", "\x00", "\u202e"]
)
def test_no_text_from_outside_begins_a_line_or_controls_the_terminal(forged: str) -> None:
    text = f"x{forged}2026-11-15 06:10:50.123 error   all is lost"
    made = record(logging.WARNING, text, exc_info=raised(text))
    for colour in (False, True):
        first, *more = TextFormatter(colour=colour).format(made).split("\n")
        assert "all is lost" in first
        assert more[-1].endswith("all is lost")
        assert all(line.startswith("  ") and line.isprintable() for line in more)
        assert colour or first.isprintable()


def test_what_the_application_logs_is_written_too_but_no_drivers_secrets() -> None:
    stream = io.StringIO()
    # Those that pytest puts there for each test.
    logging.getLogger().handlers = []
    configure(LogLevel.debug, LogFormat.text, stream)
    logging.getLogger("shop").info("paid")
    logging.getLogger("some.client").debug("password=hush")
    logging.getLogger("relaybox.relay").debug("probing")
    written = stream.getvalue().splitlines()
    assert [line[24:] for line in written] == ["info    paid", "debug   probing"]


def test_an_application_that_has_set_up_logging_keeps_it() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    logging.getLogger().handlers = [logging.StreamHandler(theirs)]
    configure(LogLevel.warning, LogFormat.json, stream)
    logging.getLogger("shop").warning("paid")
    logging.getLogger("relaybox.relay").warning("trouble")
    logging.getLogger("relaybox.relay").info("work")
    assert theirs.getvalue() == "paid\n"
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["trouble"]
