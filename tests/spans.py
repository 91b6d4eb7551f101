"""Spans that a test can look at."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def collecting(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collect every span that ends during the test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # The official way sets one for the life of the process.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Return the spans of that name, in the order they ended."""
    return [span for span in exporter.get_finished_spans() if span.name == name]
