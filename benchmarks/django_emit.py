"""Measure ``emit_event`` against a minimal model's ``objects.create``, in transactions of the same kind.

What a commit wakes matters if a transaction holds a single event, so each choice is shown.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from django.conf import settings
from django.db import transaction
from django.test.utils import override_settings

from benchmarks.django_project.models import Note
from benchmarks.harness import PAYLOAD, Sample, report, run, take_turns
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.models import OutboxEvent

ALLOWED_COST = 1.3
ROUNDS = 10
SHAPES = {"500 a transaction": (500, 1), "one a transaction": (1, 20)}
"""Events in each transaction, and transactions of one variant per turn."""

DISPATCHES = ("none", "celery", "relay")

Act: TypeAlias = Callable[[int], Any]


def create(number: int) -> Any:
    """Write a row as Django does."""
    return Note.objects.create(name=f"order {number}", data=PAYLOAD)


def emit(number: int) -> Any:
    """Write an event."""
    return emit_event("Order", number, "order.paid", PAYLOAD)


def microseconds(act: Act, events: int, transactions: int) -> float:
    """Return the microseconds of the transactions per row."""
    start = time.perf_counter()
    for _ in range(transactions):
        with transaction.atomic():
            for number in range(events):
                act(number)
    return (time.perf_counter() - start) / (events * transactions) * 1e6


def emitting(dispatch: str, events: int, transactions: int) -> float:
    """Return ``microseconds`` of ``emit`` with this choice of what a commit wakes."""
    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": dispatch}):
        # Read the changed settings before the measurement.
        get_configuration()
        return microseconds(emit, events, transactions)


def measure(url: str) -> list[list[str]]:
    """Return the tables and the requirements."""
    found = {shape: _measure(*counts) for shape, counts in SHAPES.items()}
    _check_rows()
    run(url, "TRUNCATE outbox_event, outbox_leader")
    _show(found)
    many = found["500 a transaction"]
    cost = many["celery"].over(many["create"])
    met = "yes" if cost.median <= ALLOWED_COST else "no"
    return [["emit_event / objects.create", f"≤ {ALLOWED_COST}", cost.show(2), met]]


def _measure(events: int, transactions: int) -> dict[str, Sample]:
    variants = {"create": functools.partial(microseconds, create, events, transactions)}
    for dispatch in DISPATCHES:
        variants[dispatch] = functools.partial(emitting, dispatch, events, transactions)
    return take_turns(variants, ROUNDS, warm_up=2)


def _check_rows() -> None:
    """Check that every run has written its rows."""
    each = sum(events * transactions for events, transactions in SHAPES.values()) * (ROUNDS + 2)
    written = (Note.objects.count(), OutboxEvent.objects.pending().count())
    if written != (each, each * len(DISPATCHES)):
        raise RuntimeError(f"{written} rows, and not {each} each time")


def _show(found: dict[str, dict[str, Sample]]) -> None:
    lines: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for shape, samples in found.items():
        for dispatch in DISPATCHES:
            cost = samples[dispatch].over(samples["create"])
            times = [samples[name] for name in ("create", dispatch)]
            lines.append([f"{shape}, DISPATCH {dispatch}", *(time.show() for time in times), cost.show(2)])
            medians = {"create_us": times[0].median, "emit_us": times[1].median}
            facts.append({"shape": shape, "dispatch": dispatch, "cost": cost.median, **medians})
    columns = ["µs a row", "objects.create", "emit_event", "emit / create"]
    report("emit_event", columns, lines, {"results": facts, "allowed": ALLOWED_COST})
