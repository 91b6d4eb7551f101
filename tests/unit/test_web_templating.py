"""What pages say in few characters, and where their forms may lead."""

from __future__ import annotations

import pytest

from relaybox.web import show
from relaybox.web.templating import back

GAP = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    "given",
    [None, "", "//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\r\nb: c", "/a\tb"],
)
def test_a_form_leads_only_to_paths_of_ours(given: str | None) -> None:
    assert back(given, "/events") == "/events"


def test_a_path_of_ours_is_kept() -> None:
    assert back("/events?status=failed&error=a%2Fb", "/") == "/events?status=failed&error=a%2Fb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, f"0{GAP}ms"),
        (0.0421, f"42.1{GAP}ms"),
        (1.34, f"1.3{GAP}s"),
        (75, f"1{GAP}min"),
        (90_000, f"1{GAP}d"),
    ],
)
def test_lags_of_every_length(seconds: float | None, text: str) -> None:
    assert show.lag(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0/s"), (0.034, "0.034/s"), (12.3, "12/s"), (1234.5, "1,234/s")]
)
def test_rates(value: float | None, text: str) -> None:
    assert show.rate(value) == text


def test_sizes_and_axes() -> None:
    assert [show.size(count) for count in (None, 7, 1536, 2**20)] == [
        *("–", f"7{GAP}B", f"1.5{GAP}KiB", f"1{GAP}MiB"),
    ]
    assert [show.compact(value) for value in (0.5, 20, 1500, 2_000_000)] == ["0.5", "20", "1.5k", "2M"]
