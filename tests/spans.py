"""Spans that a test can look at."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def collecting(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """An SDK for as long as the test runs; every span that ends is in its exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # The official way sets one for the life of the process.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The spans of that name, in the order they ended."""
    return [span for span in exporter.get_finished_spans() if span.name == name]
